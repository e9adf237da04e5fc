"""llama.cpp through llama-cpp-python; the model is a GGUF file. One request at a time: that is what its API offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ridgeline.bench.engines import LoadOptions
from ridgeline.core.errors import InvalidConfig


class LlamaCpp:
    def __init__(self, model: str, options: LoadOptions) -> None:
        try:
            import llama_cpp
        except ModuleNotFoundError as error:
            raise InvalidConfig("the llama.cpp peer is not installed: pip install llama-cpp-python.") from error
        if Path(model).suffix != ".gguf" or not Path(model).is_file():
            raise InvalidConfig(f"llama.cpp reads a GGUF file, got {model!r}; give one with --peer-model FILE.gguf.")
        self.version: str = llama_cpp.__version__
        self.llm = llama_cpp.Llama(
            model_path=model,
            n_ctx=options.max_model_len,  # 0: the model's own
            n_gpu_layers=0 if options.device == "cpu" else -1,
            verbose=False,
            **options.extra,
        )
        self.dtype = "gguf:" + Path(model).stem

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        return [
            sum(1 for _ in islice(self.llm.generate(list(p), temp=temperature), n))
            for p, n in zip(prompts, max_tokens, strict=True)
        ]

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        for count, _ in enumerate(islice(self.llm.generate(list(prompt), temp=0.0), max_tokens), start=1):
            yield count

    def close(self) -> None:
        self.llm.close()
