"""Adapters of rank 2 on one layer, served side by side, beside transformers with the adapter added to the weight. All
that the engine needs for them is a part of the step, one line among the runner's parts, and the request's key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.plan.request import Request
from ridgeline.layers.linear import Linear
from ridgeline.worker.runner import Runner
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import PlannedStep, StepPart
from tests import tiny_models
from tests.driving import ask, disturbed, rig

TinyModel = Callable[[str], Path]
NAMES = ("", "red", "blue")  # the first is the model itself
RANK, TOKENS, LAYER = 2, 8, 1


class Adapters(StepPart):
    """Which adapter each token of a step has. A request names it by its key."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.number_T = torch.empty(0, dtype=torch.int64)

    def prepare(self, step: PlannedStep) -> None:
        rows = step.plan.rows
        keys = [self._slots.forms[int(slot)].keys for slot in rows.slots_R]
        self.number_T = torch.from_numpy(
            np.repeat([NAMES.index(key[0]) if key else 0 for key in keys], rows.num_tokens_R)
        )


class Adapted(nn.Module):
    """A layer, and the product of two thin matrices for each token's adapter."""

    def __init__(self, inner: Linear, adapters: Adapters) -> None:
        super().__init__()
        self.inner, self._adapters = inner, adapters
        thin = [thin_matrices(name) for name in NAMES]
        self.down_NRI, self.up_NOR = torch.stack([down for down, _ in thin]), torch.stack([up for _, up in thin])

    def forward(self, x_TI: Tensor) -> Tensor:
        number_T = self._adapters.number_T
        assert len(number_T) == len(x_TI)
        thin_TR = torch.einsum("ti,tri->tr", x_TI, self.down_NRI[number_T])
        return self.inner(x_TI) + torch.einsum("tr,tor->to", thin_TR, self.up_NOR[number_T])


def thin_matrices(name: str) -> tuple[Tensor, Tensor]:
    """Return an adapter's [RANK, inputs] and [outputs, RANK]."""
    outputs, inputs = tiny_models.build("llama").model.layers[LAYER].mlp.down_proj.weight.shape
    draw, scale = torch.Generator().manual_seed(len(name)), 1.0 if name else 0.0
    return torch.randn(RANK, inputs, generator=draw), scale * torch.randn(outputs, RANK, generator=draw)


@pytest.fixture(autouse=True)
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Runner._parts

    def parts(self: Runner) -> list[StepPart]:
        adapters = Adapters(self.slots)
        mlp: Any = self.decoder.layers[LAYER].feed_forward
        mlp.down = Adapted(mlp.down, adapters)
        return [*plain(self)[:1], adapters, *plain(self)[1:]]  # behind what fills the slots

    monkeypatch.setattr(Runner, "_parts", parts)


def asked(request_id: str, prompt: list[int], adapter: str = "") -> Request:
    return replace(ask(request_id, prompt, max_tokens=TOKENS), prefix_keys=(adapter,) if adapter else ())


def by_transformers(request: Request) -> list[int]:
    oracle = tiny_models.build("llama")
    down, up = thin_matrices(*request.prefix_keys or ("",))
    with torch.inference_mode():
        oracle.model.layers[LAYER].mlp.down_proj.weight += up @ down
        ids = torch.tensor([request.prompt_token_ids])
        tokens = oracle.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
        )
    return tokens[0, len(request.prompt_token_ids) :].tolist()


def words(count: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 300) for _ in range(count)]


REQUESTS = [
    asked(f"{name or 'plain'}, {length}", words(length, length), name) for length in (5, 23, 50) for name in NAMES
]


@pytest.mark.parametrize("chunk", [8, 64])
def test_tokens_are_those_of_the_merged_weights(chunk: int, tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), max_num_batched_tokens=chunk) as own:
        outcomes = own.run(*REQUESTS)
        found = {request.id: outcomes[request.id].tokens for request in REQUESTS}
    assert found == {request.id: by_transformers(request) for request in REQUESTS}
    assert found["red, 23"] != found["plain, 23"] != found["blue, 23"]


def test_what_an_adapter_cached_is_found_by_its_own_requests_alone(tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama")) as own:

        def new(name: str, adapter: str) -> int:
            before = own.engine.scheduler.cache.hit_tokens
            request = asked(name, words(20, 3), adapter)
            own.run(request)
            assert own.outcomes[name].tokens == by_transformers(request)
            return own.engine.scheduler.cache.hit_tokens - before

        assert [new(f"first {name}", name) for name in NAMES] == [0, 0, 0]
        assert [new(f"again {name}", name) for name in NAMES] == [19, 19, 19]


@pytest.mark.parametrize("seed", range(2))
def test_preemption_and_aborts_change_no_token(seed: int, tiny_model: TinyModel) -> None:
    with rig(tiny_model("llama"), max_num_batched_tokens=16) as own:
        own.add(*REQUESTS, *(replace(each, id=f"{each.id} again") for each in REQUESTS))
        left = disturbed(own, Random(seed), gives_way=0.3, leaves=0.02)
        for request in REQUESTS:
            for name in {request.id, f"{request.id} again"} - left:
                assert own.outcomes[name].tokens == by_transformers(request), name
