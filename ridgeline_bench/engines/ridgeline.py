"""Our own engine, through the offline API that anyone calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.request import SamplingParams
from ridgeline.llm import LLM
from ridgeline.offline.adapters import LoRARequest
from ridgeline.version import __version__
from ridgeline_bench.engines import Adapter, LoadOptions, trace_here


class Ridgeline:
    version = __version__

    @staticmethod
    def check(_model: str) -> None:
        """All that it needs was imported with this module."""

    def __init__(self, model: str, options: LoadOptions) -> None:
        self.llm = LLM(
            model,
            dtype=options.dtype,
            device=options.device,
            load_format="dummy" if options.dummy else "auto",
            max_model_len=options.max_model_len or None,
            gpu_memory_utilization=options.memory,
            skip_tokenizer_init=True,
            **options.extra,
        )
        self.dtype = self.llm.assembly.dtype

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperature: float,
        adapters: Sequence[Adapter] | None = None,
    ) -> list[int]:
        params = [_params(count, temperature) for count in max_tokens]
        named = None if adapters is None else [LoRARequest(each.name, each.number, each.folder) for each in adapters]
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=named
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        for piece in self.llm.stream({"prompt_token_ids": prompt}, _params(max_tokens, 0.0)):
            yield len(piece.completion.token_ids)

    def touched(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[float, int] | None:
        """Run all prompts so many steps beyond their first tokens, and return (experts of a layer that had tokens in
        such a step, the experts that a layer has); None for a model without experts, or where no step had one token of
        every prompt."""
        if not len(self.llm.expert_load()):
            return None
        looks: list[ExpertLoad] = []
        with self.llm.assembly.worker.watching_experts(looks.append):
            self.generate(prompts, [1 + steps] * len(prompts), 0.0)
        found = used(looks, len(prompts))
        return (found, max(looks[-1].experts)) if found else None

    def settle(self) -> None:
        """Do what the engine would do at moments without a request, such as capturing graphs."""
        while self.llm.engine.rest():
            pass

    @property
    def stages(self) -> dict[str, float]:
        """The seconds of each stage of the start, in their order."""
        ordered = sorted(self.llm.timeline.stages, key=lambda stage: stage.begin)
        return {stage.name: stage.end - stage.begin for stage in ordered}

    trace = staticmethod(trace_here)

    def close(self) -> None:
        self.llm.shutdown()


def used(looks: Sequence[ExpertLoad], batch: int) -> float:
    """Return the experts that had tokens, the mean over layers and over steps of exactly `batch` tokens; 0: no step."""
    found = [np.count_nonzero(look.step_LE, axis=1).mean() for look in looks if look.step_tokens == batch]
    return float(np.mean(found)) if found else 0.0


def _params(max_tokens: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
