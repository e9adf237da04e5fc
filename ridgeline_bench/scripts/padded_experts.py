"""A mixture's feed-forward with tokens padded to a capacity, beside products that drop and pad nothing.

    python -m ridgeline_bench.scripts.padded_experts [--shape mixtral | qwen3-moe] [--tokens 8 64 512 4096 16384]
        [--skews 0 1] [--quick] [--output FILE.jsonl]

    grouped         the engine's two ops: each expert multiplies the tokens that it got
    padded, all     torch's products: every expert gets a block of as many rows as the busiest one needs (GShard's
                    dispatch with a capacity that drops nothing), and one batched product multiplies all blocks
    padded, 1.25    the same with a capacity of 1.25 times the mean; tokens beyond it are dropped (Switch Transformer)
    one by one      torch's products: a loop over experts, each with the rows of its own tokens

Routes are random: with skew 0 all experts are equally likely, with 1 the first are chosen far more often. Capacities
and counts are known on the host beforehand, so padding waits for nothing; in an engine it would wait for them in every
layer. Each way is first compared with the plain reference of both ops. "useful rows" is the share of multiplied rows
that hold a token, apart from the tiles in which a kernel multiplies; TFLOP/s count these rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.ops import Ops
from ridgeline.perf.experts import capacity, dropped, imbalance
from ridgeline_bench.machine.timing import QUICK, Effort, median_seconds
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import OneOf, asked, keep

SHAPES = {"mixtral": (4096, 14336, 8, 2), "qwen3-moe": (2048, 768, 128, 8), "tiny": (128, 256, 8, 2)}
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # of the largest number of the result
GPU_EFFORT = Effort(seconds=0.1, repeats=7)


@dataclass(frozen=True)
class Layer:
    """The matrices of one layer. gate_up_EGM: [experts, 2 · inner, width]. down_EMF: [experts, width, inner]."""

    gate_up_EGM: Tensor
    down_EMF: Tensor

    @classmethod
    def random(cls, case: ExpertsCase, dtype: torch.dtype, device: torch.device) -> Layer:
        return cls(case.gate_up_inputs(dtype, device)[1], case.down_inputs(dtype, device)[1])

    @property
    def experts(self) -> int:
        return len(self.down_EMF)


@dataclass(frozen=True)
class Places:
    """The block and the row of every pair of a token and one of its experts, in the order of `routes.token_P`. rows: of
    a block. fits_P: the pair is within the capacity."""

    rows: int
    slot_P: Tensor
    fits_P: Tensor


def counts(routes: Routes) -> list[int]:
    """Return the number of tokens of each expert."""
    return [end - first for first, end in pairwise(routes.start_E1.tolist())]


def places(routes: Routes, rows: int) -> Places:
    """Return the places of pairs in blocks of `rows` rows. A pair without a place gets the row behind all blocks."""
    start_E1 = routes.start_E1.long()
    pair_P = torch.arange(len(routes.token_P), device=start_E1.device)
    expert_P = torch.searchsorted(start_E1[1:].contiguous(), pair_P, right=True)
    row_P = pair_P - start_E1[expert_P]
    fits_P = row_P < rows
    behind = (len(start_E1) - 1) * rows
    return Places(rows, torch.where(fits_P, expert_P * rows + row_P, behind), fits_P)


def padded(ops: Ops, x_TM: Tensor, layer: Layer, routes: Routes, where: Places) -> Tensor:
    """Return the sum over each token's experts, of pairs that have a place. [T, M]

    Products are torch's; the activation is the engine's fused op.
    """
    experts, width = layer.experts, x_TM.shape[1]
    block_NM = x_TM.new_zeros(experts * where.rows + 1, width)
    block_NM[where.slot_P] = x_TM[routes.token_P.long()]
    block_ECM = block_NM[:-1].view(experts, where.rows, width)
    g_NG = torch.bmm(block_ECM, layer.gate_up_EGM.transpose(1, 2)).flatten(0, 1)
    h_ECF = ops.gated_activation(g_NG, "silu").view(experts, where.rows, -1)
    y_NM = torch.bmm(h_ECF, layer.down_EMF.transpose(1, 2)).flatten(0, 1)
    place_TK = routes.place_TK.long()
    slot_TK = where.slot_P[place_TK].clamp(max=experts * where.rows - 1)
    weight_TK = torch.where(where.fits_P[place_TK], routes.weight_TK, 0)
    return (weight_TK[:, :, None] * y_NM[slot_TK].float()).sum(1).to(x_TM.dtype)


def one_by_one(ops: Ops, x_TM: Tensor, layer: Layer, routes: Routes, spans: list[tuple[int, int]]) -> Tensor:
    """Return the same sum, by a loop over experts. spans: the pairs of each."""
    y_PM = x_TM.new_empty(len(routes.token_P), x_TM.shape[1])
    for expert, (first, end) in enumerate(spans):
        if first < end:
            rows_NM = x_TM[routes.token_P[first:end].long()]
            h_NF = ops.gated_activation(rows_NM @ layer.gate_up_EGM[expert].T, "silu")
            y_PM[first:end] = h_NF @ layer.down_EMF[expert].T
    y_TKM = y_PM[routes.place_TK.long()].float()
    return (routes.weight_TK[:, :, None] * y_TKM).sum(1).to(x_TM.dtype)


def grouped(ops: Ops, x_TM: Tensor, layer: Layer, routes: Routes) -> Tensor:
    """Return the same sum, by the engine's ops."""
    h_PF = ops.grouped_gate_up(x_TM, layer.gate_up_EGM, None, routes, "silu")
    return ops.grouped_down(h_PF, layer.down_EMF, None, routes, None)


@dataclass(frozen=True)
class Way:
    """rows: that are multiplied. lost: share of pairs that are dropped. exact: it computes what the reference does."""

    run: Callable[[], Tensor]
    rows: int
    lost: float = 0.0

    @property
    def exact(self) -> bool:
        return self.lost == 0


def ways(ops: Ops, x_TM: Tensor, layer: Layer, routes: Routes) -> dict[str, Way]:
    """Return the ways by name."""
    got = counts(routes)
    pairs, tokens = sum(got), len(x_TM)
    spans = list(pairwise(np.cumsum([0, *got]).tolist()))
    found = {"grouped": Way(lambda: grouped(ops, x_TM, layer, routes), pairs)}
    rows = {"padded, all": max(got), "padded, 1.25": capacity(1.25, tokens, layer.experts, pairs // tokens)}
    for name, most in rows.items():
        where = places(routes, most)
        run = lambda where=where: padded(ops, x_TM, layer, routes, where)  # noqa: E731
        found[name] = Way(run, most * layer.experts, dropped(got, most) / pairs)
    found["one by one"] = Way(lambda: one_by_one(ops, x_TM, layer, routes, spans), pairs)
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error over the largest number; NaN counts as infinite."""
    worst = ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
    return worst if worst == worst else float("inf")


def bench(case: ExpertsCase, layer: Layer, device: torch.device, effort: Effort) -> list[dict[str, Any]]:
    """Return a line for each way. Raise SystemExit if one that drops nothing is wrong."""
    dtype, ops = layer.down_EMF.dtype, Ops(Platform.of(device))
    routes = case.routes(device, seed=1)
    x_TM = torch.randn(case.tokens, case.width, device=device, dtype=torch.float32).to(dtype)
    plain = Ops(Platform.of(device), {"grouped_gate_up": "reference", "grouped_down": "reference"})
    wanted = grouped(plain, x_TM, layer, routes)
    lines = []
    for name, way in ways(ops, x_TM, layer, routes).items():
        off = error(way.run(), wanted)
        if way.exact and off > TOLERANCE[dtype]:
            raise SystemExit(f"{name} is wrong by {off:.3g} of the largest number, at {case.label}.")
        seconds = median_seconds([way.run], device, effort)
        pairs = case.tokens * case.used
        kept = pairs * (1 - way.lost)
        lines.append({
            "way": name, "tokens": case.tokens, "experts": case.experts, "used": case.used, "width": case.width,
            "inner": case.inner, "skew": case.skew, "imbalance": imbalance(counts(routes)), "ms": 1e3 * seconds,
            "rows": way.rows, "useful": kept / way.rows, "dropped": way.lost,
            "tflops": 6 * kept * case.width * case.inner / seconds / 1e12, "error": off,
        })  # fmt: skip
    return lines


def main() -> None:
    a = asked(
        __doc__, shape=OneOf(("mixtral", *sorted(set(SHAPES) - {"mixtral"}))), tokens=[8, 64, 512, 4096, 16384],
        skews=[0.0, 1.0], quick=False, output=Path,
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if a.quick:
        a.shape, a.tokens = "tiny", [8, 64]
    width, inner, experts, used = SHAPES[a.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = Table("tokens", "skew", "busiest", "way", "ms", "of grouped's speed", "useful rows", "dropped", "TFLOP/s")
    with on_device(device):
        layer = Layer.random(ExpertsCase(1, width, inner, experts, used), dtype, device)
        for tokens in a.tokens:
            for skew in a.skews:
                case = ExpertsCase(tokens, width, inner, experts, used, skew=skew)
                lines = bench(case, layer, device, GPU_EFFORT if device.type == "cuda" else QUICK)
                for line in lines:
                    keep(a.output, {"workload": "padded experts", "shape": a.shape, "gpu": gpu(), **line})
                    table.add_row(
                        str(tokens), f"{skew:g}", f"{line['imbalance']:.2f}", line["way"], f"{line['ms']:.3f}",
                        f"{lines[0]['ms'] / line['ms']:.2f}", f"{100 * line['useful']:.0f} %",
                        f"{100 * line['dropped']:.1f} %", f"{line['tflops']:.3g}",
                    )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
