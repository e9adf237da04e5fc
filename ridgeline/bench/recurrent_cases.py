"""Ops with states of constant size, with their cases, as the kernel benchmark needs them.

The cases are those of the tests, without padding, and, for machines with enough memory, the layers of real models: a
prompt, and a step of 64 requests. Their rows write their states to other blocks than they read, so that every call
finds the same. Outputs are compared with the reference's; tests compare the states too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ridgeline.bench.weight_cases import Subject, chosen
from ridgeline.core.cost import Cost
from ridgeline.kernels.causal_conv import cases as conv_cases
from ridgeline.kernels.causal_conv import op as conv
from ridgeline.kernels.causal_conv.cases import ConvCase
from ridgeline.kernels.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.delta_attention import cases as kda_cases
from ridgeline.kernels.delta_attention import op as kda
from ridgeline.kernels.delta_attention.cases import DeltaAttentionCase
from ridgeline.kernels.gated_delta import cases as gated_cases
from ridgeline.kernels.gated_delta import op as gated
from ridgeline.kernels.gated_delta.cases import GatedDeltaCase
from ridgeline.kernels.gated_delta.cost import gated_delta_cost
from ridgeline.kernels.linear_attention import cases as linear_cases
from ridgeline.kernels.linear_attention import op as linear
from ridgeline.kernels.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.linear_attention.cost import linear_attention_cost
from ridgeline.kernels.op import Op
from ridgeline.kernels.selective_scan import cases as scan_cases
from ridgeline.kernels.selective_scan import op as scan
from ridgeline.kernels.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.selective_scan.cost import selective_scan_cost
from ridgeline.kernels.ssd import cases as ssd_cases
from ridgeline.kernels.ssd import op as ssd
from ridgeline.kernels.ssd.cases import SsdCase
from ridgeline.kernels.ssd.cost import ssd_cost
from ridgeline.kernels.turns import Turns
from ridgeline.kernels.wkv import cases as wkv_cases
from ridgeline.kernels.wkv import op as wkv
from ridgeline.kernels.wkv.cases import WkvCase
from ridgeline.kernels.wkv.cost import wkv_cost

ROWS = ((2048,), (1,) * 64)
SLACK = 512  # what float32 sums of some dozen products of order ten lose, in units of 2**-24

# Qwen3.5-9B, Kimi Linear, GLA-1.3B, Falcon-Mamba-7B, Codestral-Mamba-7B, RWKV-4-7B
REAL: Mapping[str, Sequence[Any]] = {
    "causal_conv": [ConvCase(rows, 8192) for rows in ROWS],
    "gated_delta": [GatedDeltaCase(rows, heads=16, value_heads=32, key_width=128, value_width=128) for rows in ROWS],
    "delta_attention": [DeltaAttentionCase(rows, heads=32, key_width=128, value_width=128) for rows in ROWS],
    "linear_attention": [LinearAttentionCase(rows, heads=4, key_width=256, value_width=512) for rows in ROWS],
    "selective_scan": [SelectiveScanCase(rows, channels=8192) for rows in ROWS],
    "ssd": [SsdCase(rows, heads=128, groups=8, head_width=64, state_width=128) for rows in ROWS],
    "wkv": [WkvCase(rows, channels=4096) for rows in ROWS],
}


def recurrent(*, real: bool = False) -> Iterator[Subject]:
    """Yield the ops' own cases, followed by those of real models if wanted."""

    def cases(name: str, own: Sequence[Any]) -> list[Any]:
        return chosen(REAL if real else {}, name, [replace(c, padding=0) for c in own])

    for c in cases("causal_conv", conv_cases.CASES):
        yield _subject(conv.CAUSAL_CONV, c, f"{c.channels} channels", _conv(c))
    for c in cases("gated_delta", gated_cases.CASES):
        shape = f"heads {c.heads}/{c.value_heads} {c.key_width}x{c.value_width}"
        yield _subject(gated.GATED_DELTA, c, shape, _gated(c))
    for c in cases("delta_attention", kda_cases.CASES):
        yield _subject(kda.DELTA_ATTENTION, c, _heads(c), _kda(c))
    for c in cases("linear_attention", linear_cases.CASES):
        yield _subject(linear.LINEAR_ATTENTION, c, f"{_heads(c)} by {c.decay}", _linear(c))
    for c in cases("selective_scan", scan_cases.CASES):
        yield _subject(scan.SELECTIVE_SCAN, c, f"{c.channels}x{c.state_width}", _scan(c))
    for c in cases("ssd", ssd_cases.CASES):
        shape = f"heads {c.heads}/{c.groups} {c.head_width}x{c.state_width}"
        yield _subject(ssd.SSD, c, shape, _ssd(c))
    for c in cases("wkv", wkv_cases.CASES):
        exponents = max(1.0, c.large / 10)  # the error of an exponent is a factor of its exponential
        yield _subject(wkv.WKV, c, f"{c.channels} channels", _wkv(c), slack=int(SLACK * exponents))


def _subject(op: Op, case: Any, shape: str, cost: Callable[[int], Cost], slack: int = SLACK) -> Subject:
    rows = case.rows
    label = f"{len(rows)}x {rows[0]}" if len(set(rows)) == 1 else str(rows).replace(" ", "")
    return Subject(op, f"{label} {shape}", _apart(case.inputs), cost, slack=slack, epsilons=16)


def _apart(inputs: Callable[..., tuple]) -> Callable[[torch.dtype, torch.device], tuple]:
    """Return a function that makes the inputs, with rows that write to the free blocks behind those that they read."""

    def made(dtype: torch.dtype, device: torch.device) -> tuple:
        return tuple(replace(x, writes_R=x.reads_R + 1) if isinstance(x, Turns) else x for x in inputs(dtype, device))

    return made


def _heads(c: LinearAttentionCase | DeltaAttentionCase) -> str:
    return f"heads {c.heads} {c.key_width}x{c.value_width}"


def _rows(c: Any) -> tuple[int, int]:
    return sum(c.rows), sum(length > 0 for length in c.rows)


def _conv(c: ConvCase) -> Callable[[int], Cost]:
    return lambda item: causal_conv_cost(*_rows(c), c.channels, c.width, itemsize=item, bias=c.bias)


def _gated(c: GatedDeltaCase) -> Callable[[int], Cost]:
    shape = {n: getattr(c, n) for n in ("heads", "value_heads", "key_width", "value_width")}
    return lambda item: gated_delta_cost(c.rows, **shape, itemsize=item)


def _kda(c: DeltaAttentionCase) -> Callable[[int], Cost]:
    shape: Any = {"heads": c.heads, "key_width": c.key_width, "value_width": c.value_width, "delta": True}
    decays = c.heads * (c.key_width + 1)  # and what decides how much a token changes
    return lambda item: linear_attention_cost(c.rows, **shape, itemsize=item, decay_bytes=item * decays)


def _linear(c: LinearAttentionCase) -> Callable[[int], Cost]:
    shape: Any = {"heads": c.heads, "key_width": c.key_width, "value_width": c.value_width}
    decays = {"channel": c.heads * c.key_width, "token": c.heads, "head": 0}[c.decay]
    return lambda item: linear_attention_cost(c.rows, **shape, itemsize=item, decay_bytes=4.0 * decays)


def _scan(c: SelectiveScanCase) -> Callable[[int], Cost]:
    shape: Any = {"channels": c.channels, "state_width": c.state_width, "gated": c.gated}
    return lambda item: selective_scan_cost(*_rows(c), **shape, itemsize=item)


def _ssd(c: SsdCase) -> Callable[[int], Cost]:
    shape = {n: getattr(c, n) for n in ("heads", "groups", "head_width", "state_width")}
    return lambda item: ssd_cost(*_rows(c), **shape, itemsize=item)


def _wkv(c: WkvCase) -> Callable[[int], Cost]:
    return lambda item: wkv_cost(*_rows(c), c.channels, itemsize=item)
