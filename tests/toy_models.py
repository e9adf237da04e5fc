"""A model with a mixer of its own: a gated running sum beside attention. It shows what a new kind of state needs.

Legend:
    T  tokens
    M  model width
    R  rows
    W  width of the running sum
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ridgeline.assembly import choices
from ridgeline.core.plan.request import Request
from ridgeline.core.specs.model import LayerSpec, ModelSpec, Product, Products
from ridgeline.core.specs.state import RecurrentSpec, StatePart
from ridgeline.layers import kinds
from ridgeline.layers.build import Build
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.perf import parts
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.state.recurrent import RecurrentLayer
from tests.driving import Rig, rig

SPREAD = 0.3  # of the weights: tokens then vary, and no argmax hangs on a rounding


@dataclass(frozen=True, kw_only=True)
class GatedSumSpec:
    """h[t] = sigmoid(g[t]) * h[t - 1] + v[t], by channel."""

    kind: ClassVar[str] = "gated_sum"
    width: int
    rope: None = None
    norms: tuple[()] = ()

    vectors: ClassVar[int] = 0

    @property
    def states(self) -> tuple[RecurrentSpec]:
        return (RecurrentSpec(parts=(StatePart((self.width,)),)),)

    @property
    def scratch(self) -> int:
        return 3 * self.width

    def products(self, width: int) -> Products:
        return {"gate_value": Product(width, 2 * self.width), "out": Product(self.width, width)}


def gated_sum(gate_TW: Tensor, value_TW: Tensor, start_R1: list[int], before_RW: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [T, W] of rows that begin at start_R1, and those after each row's last token [R, W]. The sum after a
    token is its own state."""
    sums_TW, after_RW = torch.zeros_like(value_TW), before_RW.clone()
    for row in range(len(before_RW)):
        for token in range(start_R1[row], start_R1[row + 1]):
            after_RW[row] = gate_TW[token].sigmoid() * after_RW[row] + value_TW[token]
            sums_TW[token] = after_RW[row]
    return sums_TW, after_RW


class GatedSum(nn.Module):
    def __init__(self, spec: GatedSumSpec, width: int, build: Build) -> None:
        super().__init__()
        self.gate_value = Linear(width, (spec.width, spec.width), False, build.within("gate_value"))
        self.out = Linear(spec.width, (width,), False, build.within("out"))

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: RecurrentLayer
    ) -> tuple[Tensor, Tensor]:
        y_TW, residual_TM = self.gate_value.normed(norm, x_TM, residual_TM)
        gate_TW, value_TW = y_TW.float().chunk(2, dim=-1)
        metadata = state.metadata
        sums_TW, after_RW = gated_sum(gate_TW, value_TW, metadata.start_R1.tolist(), state.load())
        rows = metadata.marks_R.nonzero().flatten()
        state.keep(metadata.marked_R[rows], sums_TW[metadata.start_R1[rows] + metadata.marks_R[rows] - 1])
        state.store(after_RW)
        return self.out(sums_TW.to(x_TM.dtype)), residual_TM


def no_ops(*arguments: Any) -> Iterator[tuple[str, Any]]:
    return iter(())


def with_sums(spec: ModelSpec, layers: str) -> ModelSpec:
    """The model with these layers: s, a running sum; f, attention; w, attention with a window of 7."""
    plain = spec.layers[0]

    def layer(kind: str) -> LayerSpec:
        if kind == "s":
            return replace(plain, mixer=GatedSumSpec(width=48))
        return replace(plain, mixer=replace(plain.attention, window=7 if kind == "w" else None))

    return replace(spec, layers=tuple(map(layer, layers)))


@contextmanager
def toy_model(llama: Path, layers: str) -> Iterator[None]:
    """What is loaded from a tiny llama's folder meanwhile has its shape and these layers."""
    config = read_model_config(llama)
    model = replace(config, spec=with_sums(config.spec, layers))
    kinds.MIXERS.register("gated_sum", "tests.toy_models:GatedSum")
    parts.MIXERS.register("gated_sum", "tests.toy_models:no_ops")
    with patch.object(choices, "described", lambda folder, *settings: model):
        yield


@torch.inference_mode()
def fill(decoder: Decoder) -> None:
    """Give it weights that depend on nothing else."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(generator=generator).mul_(SPREAD).add_(1.0 if "norm" in name else 0.0)


@contextmanager
def toy_rig(llama: Path, layers: str, **settings: Any) -> Iterator[Rig]:
    """An engine for a tiny llama's shape with other layers."""
    with toy_model(llama, layers), rig(llama, load_format="dummy", **settings) as own:
        fill(own.runner.decoder)
        yield own


class Whole(DenseCausal):
    """The states of one sequence run at once: sums begin with zeros and are not kept."""

    def __init__(self, tokens: int) -> None:
        super().__init__(1)
        self.metadata = SimpleNamespace(
            start_R1=torch.tensor([0, tokens]), marks_R=torch.zeros(1, dtype=torch.int64), marked_R=torch.zeros(1)
        )

    def keep(self, blocks: Tensor, states: Tensor) -> None: ...

    def load(self) -> Tensor:
        return torch.zeros(1, 48)

    def store(self, states_RW: Tensor) -> None: ...


@torch.inference_mode()
def greedy(decoder: Decoder, request: Request) -> list[int]:
    """Its tokens by the decoder alone, which runs everything again for each."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.max_total_tokens:
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), Whole(len(tokens)))
        tokens.append(int(decoder.logits(hidden.at(slice(-1, None))).argmax()))
    return tokens[len(request.prompt_token_ids) :]
