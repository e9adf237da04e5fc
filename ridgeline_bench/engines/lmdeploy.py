"""LMDeploy through its PyTorch engine, as its own benchmark of throughput drives it. It needs a GPU.

Its engine is a set of coroutines of one event loop, which runs while requests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline_bench.engines import LoadOptions, imported, trace_here


class LMDeploy:
    """LMDeploy. `extra` holds fields of its PytorchEngineConfig."""

    @staticmethod
    def check(_model: str) -> None:
        imported("lmdeploy", "lmdeploy")
        imported("lmdeploy.pytorch.engine", "lmdeploy")

    def __init__(self, model: str, options: LoadOptions) -> None:
        if options.dummy:
            raise InvalidConfig(
                "LMDeploy reads weights; write random ones by python -m ridgeline_bench.scripts.random_model "
                f"{model} FOLDER, and name that folder."
            )
        lmdeploy = imported("lmdeploy", "lmdeploy")
        self.version: str = lmdeploy.__version__
        self._generation = lmdeploy.GenerationConfig
        arguments: dict[str, Any] = {
            "dtype": options.dtype,
            "session_len": options.max_model_len or None,
            "cache_max_entry_count": options.memory,
            "enable_prefix_caching": True,
        }
        config = lmdeploy.PytorchEngineConfig(**{**arguments, **options.extra})
        engine = imported("lmdeploy.pytorch.engine", "lmdeploy").Engine
        self.engine = engine.from_pretrained(model, engine_config=config)
        self.dtype = str(self.engine.model_config.dtype).removeprefix("torch.")
        self._loop, self._requests = asyncio.new_event_loop(), 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        async def run() -> list[int]:
            requests = zip(prompts, max_tokens, strict=True)
            return list(await asyncio.gather(*(self._last(p, count, temperature) for p, count in requests)))

        return self._loop.run_until_complete(run())

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        counts = self._counts(prompt, max_tokens, 0.0)
        while True:
            try:
                yield self._loop.run_until_complete(anext(counts))
            except StopAsyncIteration:
                return

    trace = staticmethod(trace_here)

    def close(self) -> None:
        self.engine.close()
        self._loop.close()

    async def _last(self, prompt: Sequence[int], max_tokens: int, temperature: float) -> int:
        return max([count async for count in self._counts(prompt, max_tokens, temperature)], default=0)

    async def _counts(self, prompt: Sequence[int], max_tokens: int, temperature: float) -> AsyncIterator[int]:
        """Yield the number of tokens so far."""
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        config = self._generation(max_new_tokens=max_tokens, ignore_eos=True, **draw)
        self._requests += 1
        count = 0
        async for output in self.engine.create_instance().async_stream_infer(
            self._requests, input_ids=list(prompt), gen_config=config
        ):
            if output.status.name not in ("SUCCESS", "FINISH"):
                raise RidgelineError(f"LMDeploy ended a request with {output.status.name}.")
            count += len(output.token_ids)
            if output.token_ids:
                yield count
