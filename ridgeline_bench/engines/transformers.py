"""Hugging Face transformers: AutoModelForCausalLM.generate, prompts padded on the left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from ridgeline_bench.engines import LoadOptions, imported, trace_here
from ridgeline_bench.engines.padded import in_batches


class Transformers:
    @staticmethod
    def check(_model: str) -> None:
        imported("transformers", "transformers")

    def __init__(self, model: str, options: LoadOptions) -> None:
        transformers = imported("transformers", "transformers")
        self.version: str = transformers.__version__
        cuda = options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        factory: Any = transformers.AutoModelForCausalLM
        config = transformers.AutoConfig.from_pretrained(model)
        dtype = config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        arguments = {"dtype": dtype or torch.float32, **options.extra}
        if options.dummy:
            with self.device:
                self.model = factory.from_config(config, **arguments)
        else:
            self.model = factory.from_pretrained(model, **arguments)
        self.model = self.model.to(self.device).eval()
        self.dtype = str(self.model.dtype).removeprefix("torch.")

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        return in_batches(prompts, max_tokens, lambda batch, tokens: self._run(batch, tokens, temperature))

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        arrived: SimpleQueue[int] = SimpleQueue()
        thread = Thread(target=self._run, args=([prompt], max_tokens, 0.0, _Counter(arrived)))
        thread.start()
        while (count := arrived.get()) >= 0:
            yield count
        thread.join()

    trace = staticmethod(trace_here)

    def close(self) -> None:
        del self.model

    @torch.inference_mode()
    def _run(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, streamer: Any = None) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = self.model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
            streamer=streamer,
            **draw,
        )
        return out.shape[1] - width


class _Counter:
    """A streamer in transformers' sense, which gets the prompt first and then every token."""

    def __init__(self, arrived: SimpleQueue[int]) -> None:
        self.arrived, self.count = arrived, -1

    def put(self, _: Any) -> None:
        self.count += 1
        if self.count:
            self.arrived.put(self.count)

    def end(self) -> None:
        self.arrived.put(-1)
