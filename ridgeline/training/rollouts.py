"""Rollouts: answers that the engine draws in this process, from weights that are copied into its own in place.

Legend:
    V  vocabulary
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ridgeline.core.plan.request import SamplingParams
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.live import LiveWeights
from ridgeline.worker.local import LocalWorker

MOST_AT_ONCE = {"cpu": 64, "cuda": 256}


# `ridgeline.LLM`, which stands above this package
BuildsEngine = Callable[..., Any]


class Rollout(NamedTuple):
    """An answer to a prompt. logprobs: float32, of its tokens when they were drawn. ended: it was not cut off."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True)
class RolloutBatch:
    """The answers of a step.

    version: how many updates the weights had that drew them. prompts: their places in the data. answers: by prompt.
    seconds: that drawing took.
    """

    step: int
    version: int
    prompts: tuple[int, ...]
    answers: tuple[tuple[Rollout, ...], ...]
    seconds: float

    def kept(self) -> dict[str, Any]:
        """Return the batch as JSON has it."""
        return {
            "step": self.step, "version": self.version, "prompts": self.prompts, "seconds": self.seconds,
            "answers": [[[one.tokens, one.logprobs, one.ended] for one in each] for each in self.answers],
        }  # fmt: skip

    @staticmethod
    def of(kept: dict[str, Any]) -> RolloutBatch:
        """Return the batch that was kept."""
        answers = tuple(
            tuple(Rollout(tuple(tokens), tuple(logprobs), ended) for tokens, logprobs, ended in each)
            for each in kept["answers"]
        )
        return RolloutBatch(kept["step"], kept["version"], tuple(kept["prompts"]), answers, kept["seconds"])


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The settings of rollouts.

    prompts, samples: of a step, and the answers of each. max_tokens: the most of an answer. longest: the most tokens
    of a prompt. temperature: at which tokens are drawn; log-probabilities are those before it. exact: these have
    the trainer's bits. cache: bytes of keys and values on a GPU.
    """

    prompts: int
    samples: int
    max_tokens: int
    longest: int
    seed: int
    temperature: float = 1.0
    exact: bool = True
    cache: int = 2 << 30


class Rollouts(Protocol):
    """A source of answers: an engine of this process, or a server. version: how many updates its weights have had."""

    config: RolloutConfig
    version: int

    def push(self, policy: Decoder, version: int) -> float:
        """Give it the policy's weights. Return the seconds that it took."""

    def draw(self, step: int, chosen: Sequence[int], prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        """Draw the answers of a step."""

    def close(self) -> None:
        """Leave it, or end it."""


class RolloutEngine:
    """An engine that draws answers. version: how many updates its weights have had, or -1: they are the folder's, which
    the policy's need not be, since a run may go on from an adapter."""

    def __init__(
        self, build: BuildsEngine, folder: Path, dtype: torch.dtype, device: torch.device, config: RolloutConfig
    ) -> None:
        self.config, self.version = config, -1
        most = min(config.prompts * config.samples, MOST_AT_ONCE[device.type])
        options: dict[str, Any] = {"kv_cache_memory": config.cache} if device.type == "cuda" else {}
        self._llm = build(
            folder, device=str(device), dtype=str(dtype).removeprefix("torch."), deterministic=config.exact,
            max_num_seqs=most, max_model_len=config.longest + config.max_tokens, seed=config.seed, **options,
        )  # fmt: skip
        worker = self._llm.assembly.worker
        assert isinstance(worker, LocalWorker)
        self._weights = LiveWeights(worker.runner.decoder, self._llm.assembly.model.weights)
        self._device = device

    def push(self, policy: Decoder, version: int) -> float:
        """Copy the policy's weights into the engine's, in place, so that graphs stay. Nothing may be under way. Return
        the seconds that it took. Raise InvalidConfig if the engine's have another form."""
        started = time.monotonic()
        self._weights.take(policy)
        self._llm.reset_prefix_cache()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.version = version
        return time.monotonic() - started

    def draw(self, step: int, chosen: Sequence[int], prompts: Sequence[Sequence[int]]) -> RolloutBatch:
        """Draw the answers of a step. chosen: the places of its prompts, whose tokens `prompts` has."""
        started, config = time.monotonic(), self.config
        params = [
            SamplingParams(
                n=config.samples, temperature=config.temperature, max_tokens=config.max_tokens, logprobs=0,
                detokenize=False, seed=seed_of(config.seed, step, place),
            )
            for place in range(len(chosen))
        ]  # fmt: skip
        given = [{"prompt_token_ids": list(each)} for each in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        answers = tuple(tuple(_rollout(one) for one in each.outputs) for each in outputs)
        return RolloutBatch(step, self.version, tuple(chosen), answers, time.monotonic() - started)

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()


def _rollout(output: Any) -> Rollout:
    tokens = tuple(output.token_ids)
    logprobs = tuple(output.logprobs.logprob(place) for place in range(len(tokens)))
    return Rollout(tokens, logprobs, output.finish_reason != "length")


def seed_of(*numbers: int) -> int:
    """Return the seed of a request, which depends on all of the numbers."""
    return int.from_bytes(sha256(repr(numbers).encode()).digest()[:7], "little")


def prompts_of(step: int, count: int, total: int, seed: int) -> list[int]:
    """Return the places of a step's prompts: the data's order is drawn anew for each time that it is read."""
    found = []
    for place in range(step * count, (step + 1) * count):
        order = list(range(total))
        random.Random(f"{seed}/{place // total}").shuffle(order)
        found.append(order[place % total])
    return found
