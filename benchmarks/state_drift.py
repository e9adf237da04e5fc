"""How far recurrent states drift from float64 when a request decodes for long.

    python -m benchmarks.state_drift [--tokens 32768] [--only ssd] [--output benchmarks/results/state-drift.jsonl]

One request runs so many tokens from a fresh state. The same inputs go through the recurrence in float64, and through
the op in plain torch in three ways:

    steps     one token a step, as a request decodes, and the state in float32
    chunks    512 tokens a step, as a prompt runs, and the state in float32
    bfloat16  one token a step, and the state is rounded to bfloat16 after each, as if it were stored so

The heads forget at unlike speeds, the fastest within 16 tokens and the slowest within 16,384, so that errors have the
time to add up. Inputs are random numbers of bfloat16, and outputs are float32: what is left is the error of the states
and of the arithmetic. An error is the norm of the differences of 1,024 tokens' outputs over the norm of the outputs.
Those of the slowest head stand beside those of all.

Legend:
    H  heads, or channels of an op that has no heads
    T  tokens
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.bench.results import host
from ridgeline.kernels.gated_delta import op as gated_delta
from ridgeline.kernels.linear_attention import op as linear_attention
from ridgeline.kernels.op import Op, Platform
from ridgeline.kernels.selective_scan import op as selective_scan
from ridgeline.kernels.ssd import op as ssd
from ridgeline.kernels.turns import Turns, rows_of
from ridgeline.kernels.wkv import op as wkv

CPU = torch.device("cpu")
HEADS, WIDTH, CHANNELS = 4, 32, 32
FASTEST, SLOWEST = 16, 16_384  # tokens within which a head forgets all but 1/e
CHUNK, WINDOW = 512, 1024
ONE = math.log(math.e - 1)  # a bias with which a step has the size of about one, so that rates are those of tokens
AT = (1024, 8192, 32_768)  # the tokens at which errors are read
Arguments = list[Any]


class Made(NamedTuple):
    """The arguments of an op for one row. states: which of them are the states."""

    op: Op[Any]
    arguments: Arguments
    states: int


def rates(count: int) -> Tensor:
    """Return what heads forget with each token, from the fastest to the slowest, as logarithms."""
    return -torch.linspace(math.log(FASTEST), math.log(SLOWEST), count).neg().exp()


def inputs(name: str, tokens: int) -> Made:
    if name == "gated_delta":
        delta = gated_delta.Case((tokens,), HEADS, HEADS, WIDTH, WIDTH, fresh=(0,))
        given: Arguments = list(delta.inputs(torch.bfloat16, CPU))
        given[5], given[6] = rates(HEADS).neg().log(), torch.full((HEADS,), ONE)
        return Made(gated_delta.GATED_DELTA, given, 7)
    if name == "linear_attention":
        linear = linear_attention.Case((tokens,), HEADS, WIDTH, WIDTH, "head", fresh=(0,))
        given = list(linear.inputs(torch.bfloat16, CPU))
        given[3] = rates(HEADS)
        return Made(linear_attention.LINEAR_ATTENTION, given, 4)
    if name == "ssd":
        given = list(ssd.Case((tokens,), heads=HEADS, groups=1, fresh=(0,)).inputs(torch.bfloat16, CPU))
        given[2], given[6] = rates(HEADS), torch.full((HEADS,), ONE)
        return Made(ssd.SSD, given, 9)
    if name == "selective_scan":
        scan = selective_scan.Case((tokens,), channels=CHANNELS, state_width=16, gated=False, fresh=(0,))
        given = list(scan.inputs(torch.bfloat16, CPU))
        given[2], given[6] = rates(CHANNELS)[:, None].repeat(1, 16), torch.full((CHANNELS,), ONE)
        return Made(selective_scan.SELECTIVE_SCAN, given, 8)
    given = list(wkv.Case((tokens,), channels=CHANNELS, fresh=(0,)).inputs(torch.bfloat16, CPU))
    given[2] = rates(CHANNELS)
    return Made(wkv.WKV, given, 4)


OPS = ("gated_delta", "ssd", "selective_scan", "linear_attention", "wkv")


def converted(made: Made, tokens: int, dtype: torch.dtype) -> Arguments:
    """Return the arguments in another dtype, the tokens' own and the states."""
    return [
        x.to(dtype) if isinstance(x, Tensor) and (i == made.states or x.shape[:1] == (tokens,)) else x
        for i, x in enumerate(made.arguments)
    ]


def exact(made: Made, tokens: int) -> Tensor:
    """Return the outputs of the recurrence in float64."""
    out: Tensor = made.op.reference(*converted(made, tokens, torch.float64))
    return out


def in_steps(made: Made, tokens: int, size: int, rounded: bool) -> Tensor:
    """Return the outputs of the op that runs so many tokens a step, [T, H, …]. rounded: the states become bfloat16
    between steps."""
    run: Callable[..., Tensor] = made.op.choose(Platform.of(CPU), "torch")
    arguments = converted(made, tokens, torch.float32)
    states: Tensor = arguments[made.states]
    per_token = [isinstance(x, Tensor) and i != made.states and len(x) == tokens for i, x in enumerate(arguments)]
    outs = []
    for first in range(0, tokens, size):
        turns = rows_of([min(size, tokens - first)], [1], CPU, fresh=first == 0)
        given = [x[first : first + size] if own else x for x, own in zip(arguments, per_token, strict=True)]
        outs.append(run(*(turns if isinstance(x, Turns) else x for x in given)))
        if rounded:
            states.copy_(states.bfloat16())
    return torch.cat(outs)


def errors(got_TH: Tensor, want_TH: Tensor, end: int) -> tuple[float, float]:
    """Return the relative errors of the last outputs before token `end`: of all heads, and of the slowest."""
    want_TH = want_TH[max(0, end - WINDOW) : end]
    wrong_TH = got_TH[max(0, end - WINDOW) : end] - want_TH
    return float(wrong_TH.norm() / want_TH.norm()), float(wrong_TH[:, -1].norm() / want_TH[:, -1].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=AT[-1])
    parser.add_argument("--only", choices=OPS)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ends = [end for end in AT if end < asked.tokens] + [asked.tokens]
    titles = ["op", "way", *(f"{end:,} tokens" for end in ends), "slowest head"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in OPS if asked.only is None else (asked.only,):
        made = inputs(name, asked.tokens)
        want = exact(made, asked.tokens)
        for way, size, rounded in (("steps", 1, False), ("chunks", CHUNK, False), ("bfloat16", 1, True)):
            started = time.perf_counter()
            got = in_steps(made, asked.tokens, size, rounded)
            found = [errors(got, want, end) for end in ends]
            figures = [f"{error:.1e}" for error in (*(all_heads for all_heads, _ in found), found[-1][1])]
            print(f"| {' | '.join([name, way, *figures])} |", flush=True)
            for end, (all_heads, slowest) in zip(ends, found, strict=True):
                row = {
                    "workload": "state drift",
                    "op": name,
                    "way": way,
                    "tokens": end,
                    "error": all_heads,
                    "error_of_the_slowest_head": slowest,
                    "seconds": time.perf_counter() - started,
                    "machine": asdict(host()),
                    "date": time.strftime("%Y-%m-%d"),
                }
                if asked.output is not None:
                    with asked.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
