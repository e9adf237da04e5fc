"""vLLM through its offline API, in one process, as its own benchmarks run it: prefix caching on, no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline_bench.engines import Adapter, LoadOptions, imported, trace_here

# One process (so that we can synchronize its timings), no network, and no samplers compiled at run time.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLM:
    @staticmethod
    def check(_model: str) -> None:
        imported("vllm", "vllm", ENVIRONMENT)

    def __init__(self, model: str, options: LoadOptions) -> None:
        vllm = imported("vllm", "vllm", ENVIRONMENT)
        self.version: str = vllm.__version__
        self._vllm = vllm
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": options.dtype,
            "load_format": "dummy" if options.dummy else "auto",
            "skip_tokenizer_init": True,
            "max_model_len": options.max_model_len or None,
            "gpu_memory_utilization": options.memory,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        self.llm = vllm.LLM(**{**arguments, **options.extra})
        self.dtype = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperature: float,
        adapters: Sequence[Adapter] | None = None,
    ) -> list[int]:
        params = [self._params(count, temperature) for count in max_tokens]
        named: dict[str, Any] = {}
        if adapters is not None:
            request = imported("vllm.lora.request", "vllm", ENVIRONMENT).LoRARequest
            named["lora_request"] = [request(each.name, each.number, each.folder) for each in adapters]
        given = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False, **named)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        engine = self.llm.llm_engine
        engine.add_request("stream", {"prompt_token_ids": list(prompt)}, self._params(max_tokens, 0.0))
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield len(output.outputs[0].token_ids)

    trace = staticmethod(trace_here)

    def close(self) -> None:
        del self.llm

    def _params(self, max_tokens: int, temperature: float) -> Any:
        return self._vllm.SamplingParams(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
