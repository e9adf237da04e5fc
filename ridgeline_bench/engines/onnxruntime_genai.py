"""ONNX Runtime GenAI: a Generator for each batch. The model is a folder that its own model builder wrote.

Prompts are padded on the right with the model's padding token, which then is not attended to; padded on the left they
get other tokens. The package also has an engine that batches continuously, for models with paged attention on CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.engines import LoadOptions, imported, trace_here
from ridgeline_bench.engines.padded import Prompts, in_batches

CONFIG = "genai_config.json"
MOST = 32  # requests in a batch that it takes


class OnnxRuntimeGenAI:
    """ONNX Runtime GenAI. `extra` is put over genai_config.json, for example
    `{"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}`."""

    @staticmethod
    def check(model: str) -> None:
        imported("onnxruntime_genai", "onnxruntime-genai")
        if not (Path(model) / CONFIG).is_file():
            raise InvalidConfig(
                f"ONNX Runtime GenAI reads a folder with {CONFIG}, got {model!r}; write one by python -m "
                "onnxruntime_genai.models.builder -m MODEL -i MODEL -o FOLDER -p fp32 -e cpu (it needs onnx-ir and "
                "transformers), and name it with --peer-model FOLDER."
            )

    def __init__(self, model: str, options: LoadOptions) -> None:
        self.check(model)
        self._og = imported("onnxruntime_genai", "onnxruntime-genai")
        self.version: str = self._og.__version__
        self._padding = int(json.loads((Path(model) / CONFIG).read_text())["model"].get("pad_token_id") or 0)
        config = self._og.Config(model)
        cuda = options.device.startswith("cuda") or (options.device == "auto" and self._og.is_cuda_available())
        config.clear_providers()
        if cuda:
            config.append_provider("cuda")
        if options.extra:
            config.overlay(json.dumps(dict(options.extra)))
        self._model = self._og.Model(config)
        generator = self._generator([[1]], 1, 0.0)
        self.dtype = str(np.asarray(generator.get_output("logits")).dtype)  # of activations; weights may be packed

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        def run(batch: Prompts, tokens: int) -> int:
            generator = self._generator(batch, tokens, temperature)
            while not generator.is_done():
                generator.generate_next_token()
            return len(generator.get_sequence(0)) - max(map(len, batch))

        return in_batches(prompts, max_tokens, run, most=MOST)

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        generator, count = self._generator([prompt], max_tokens, 0.0), 0
        while not generator.is_done():
            generator.generate_next_token()
            count += 1
            yield count

    trace = staticmethod(trace_here)

    def close(self) -> None:
        del self._model

    def _generator(self, prompts: Prompts, tokens: int, temperature: float) -> Any:
        """Return a generator that has run the prompts and does not stop before `tokens`."""
        width = max(map(len, prompts))
        params = self._og.GeneratorParams(self._model)
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        params.set_search_options(
            batch_size=len(prompts), max_length=width + tokens, min_length=width + tokens,
            **(draw if temperature else {"do_sample": False}),
        )  # fmt: skip
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(np.array([[*p, *[self._padding] * (width - len(p))] for p in prompts], dtype=np.int32))
        return generator
