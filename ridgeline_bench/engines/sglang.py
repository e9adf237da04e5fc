"""SGLang through its offline engine: radix cache on, no tokenizer.

SGLang runs its scheduler in a process of its own and hands requests over a socket. That is part of its figures.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgeline.core.errors import RidgelineError
from ridgeline_bench.engines import LoadOptions, imported

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLE_TELEMETRY": "1"}


class SGLang:
    @staticmethod
    def check(_model: str) -> None:
        imported("sglang.srt.entrypoints.engine", "sglang", ENVIRONMENT)

    def __init__(self, model: str, options: LoadOptions) -> None:
        engine = imported("sglang.srt.entrypoints.engine", "sglang", ENVIRONMENT).Engine
        self.version: str = imported("sglang", "sglang").__version__
        arguments: dict[str, Any] = {
            "model_path": model,
            "dtype": options.dtype,
            "load_format": "dummy" if options.dummy else "auto",
            "skip_tokenizer_init": True,
            "context_length": options.max_model_len or None,
            "mem_fraction_static": options.memory,
            "random_seed": 0,
            "log_level": "error",
        }
        self.engine = engine(**{**arguments, **options.extra})
        self.dtype = str(self.engine.server_args.dtype)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        outputs = self.engine.generate(
            input_ids=[list(p) for p in prompts], sampling_params=[_params(count, temperature) for count in max_tokens]
        )
        return [_tokens(output) for output in outputs]

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        for output in self.engine.generate(
            input_ids=list(prompt), sampling_params=_params(max_tokens, 0.0), stream=True
        ):
            yield _tokens(output)

    def trace(self, run: Callable[[], object], out: Path) -> None:
        """Trace the scheduler's process, where the model runs, by SGLang's own use of torch's profiler."""
        with tempfile.TemporaryDirectory() as folder:
            self.engine.start_profile(
                output_dir=folder, activities=["CPU", "GPU"], with_stack=False, record_shapes=False
            )
            run()
            self.engine.stop_profile()
            written = sorted(Path(folder).glob("*.trace.json.gz"))
            if not written:
                raise RidgelineError("SGLang wrote no trace; it does so for torch's profiler only.")
            out.write_bytes(gzip.decompress(written[0].read_bytes()))

    def close(self) -> None:
        self.engine.shutdown()


def _params(max_tokens: int, temperature: float) -> dict[str, Any]:
    return {"temperature": temperature, "max_new_tokens": max_tokens, "ignore_eos": True}


def _tokens(output: Any) -> int:
    return int(output["meta_info"]["completion_tokens"])
