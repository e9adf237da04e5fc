"""The drift of recurrent states over many steps of decoding: every step rounds the state, and no later one forgets it.

    python -m ridgeline_bench.scripts.drift [--tokens 32768] [--json results.jsonl]

Each op runs one token a step, as a request does that decodes, with its state in float32 or rounded to bfloat16 after
every step. The reference is the recurrence over all tokens in float64. A figure is the root of the mean squared error
of the outputs, divided by that of the outputs themselves, over the 256 tokens up to a place. Inputs are normal random
numbers; "usual" decays are those of the op's cases, and "slow" ones forget so little that a state still holds its first
tokens at the end. "chunks" is a prompt of all tokens, in rows of 512, with float32 states.

It takes a quarter of an hour of one core; --tokens 1024 half a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.scans.gated_delta import op as gated_delta
from ridgeline.kernels.scans.gated_delta.cases import DeltaCase, channel_case
from ridgeline.kernels.scans.linear_attention import op as linear_attention
from ridgeline.kernels.scans.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.scans.metadata import ScanMetadata, metadata_of
from ridgeline.kernels.scans.selective_scan import op as selective_scan
from ridgeline.kernels.scans.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.scans.ssd import op as ssd
from ridgeline.kernels.scans.ssd.cases import SsdCase
from ridgeline.kernels.scans.wkv import op as wkv
from ridgeline.kernels.scans.wkv.cases import WkvCase
from ridgeline_bench.scripts.asked import asked, keep

CPU = torch.device("cpu")
WINDOW = 256  # tokens over which an error is taken
CHUNK = 512
SLOW = 1e-4  # of the usual decay


@dataclass(frozen=True)
class Subject:
    """An op whose drift is measured. decays: the input that says how much is forgotten, and how it becomes slow."""

    op: Any
    case: Callable[[int], Any]
    decays: str
    slower: Callable[[Tensor], Tensor]


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda decay: decay * factor


SUBJECTS = (
    Subject(gated_delta.GATED_DELTA, lambda n: DeltaCase((n,), fresh=(0,)), "log_rate_G", lambda rate: rate - 9.2),
    Subject(gated_delta.DELTA_ATTENTION, lambda n: channel_case((n,), fresh=(0,)), "log_rate_G", lambda r: r - 9.2),
    Subject(linear_attention.LINEAR_ATTENTION, lambda n: LinearAttentionCase((n,), fresh=(0,)), "decay", times(SLOW)),
    Subject(ssd.SSD, lambda n: SsdCase((n,), fresh=(0,)), "rate_H", times(SLOW)),
    Subject(selective_scan.SELECTIVE_SCAN, lambda n: SelectiveScanCase((n,), fresh=(0,)), "rate_XS", times(SLOW)),
    Subject(wkv.WKV, lambda n: WkvCase((n,), fresh=(0,)), "decay_X", times(SLOW)),
)


def arguments(subject: Subject, tokens: int, slow: bool) -> tuple[Any, Tensor, ScanMetadata]:
    """Return the op's inputs, states and rows."""
    given, states, metadata = subject.case(tokens).inputs(torch.float32, CPU)
    if slow:
        given = replace(given, **{subject.decays: subject.slower(getattr(given, subject.decays))})
    return given, states, metadata


def reference(subject: Subject, given: Any, states: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return the outputs of the recurrence in float64."""
    exact = {name: x.double() for name, x in vars(given).items() if isinstance(x, Tensor)}
    return subject.op.reference(replace(given, **exact), states.double(), metadata)


def in_steps(
    subject: Subject,
    arguments: tuple[Any, Tensor, ScanMetadata],
    each: int,
    rounded: torch.dtype | None,
    done: Callable[[int], object] = lambda tokens: None,
) -> Tensor:
    """Return the outputs of steps of `each` tokens. rounded: the dtype to which states are rounded after every step."""
    run, (given, before, metadata) = subject.op.choose(Platform.of(CPU)), arguments
    states, outputs, tokens = before.clone(), [], metadata.num_tokens
    for first in range(0, tokens, each):
        end = min(first + each, tokens)
        step = metadata_of((end - first,), CPU, fresh=(0,) if not first else ())
        outputs.append(run(given.at(slice(first, end)), states, step))
        if rounded is not None:
            states.copy_(states.to(rounded))
        if first % 1024 == 0:
            done(end)
    return torch.cat(outputs)


def error(got: Tensor, want: Tensor, end: int) -> float:
    """Return the relative error of the last tokens before `end`."""
    got, want = got[max(0, end - WINDOW) : end].double(), want[max(0, end - WINDOW) : end]
    return float(((got - want).square().mean() / want.square().mean()).sqrt())


FORMS: dict[str, tuple[int, torch.dtype | None]] = {
    "float32": (1, None),
    "bfloat16": (1, torch.bfloat16),
    "chunks": (CHUNK, None),
}


def measure(tokens: int, places: Sequence[int], progress: Progress) -> list[dict[str, Any]]:
    records = []
    for subject in SUBJECTS:
        for slow in (False, True):
            given = arguments(subject, tokens, slow)
            want = reference(subject, *given)
            for form, (each, rounded) in FORMS.items():
                task = progress.add_task(f"{subject.op.name}, {'slow' if slow else 'usual'}, {form}", total=tokens)
                got = in_steps(subject, given, each, rounded, lambda n, t=task: progress.update(t, completed=n))
                progress.remove_task(task)
                found = {"op": subject.op.name, "decay": "slow" if slow else "usual", "form": form}
                records.append(found | {"errors": {end: error(got, want, end) for end in places}})
    return records


def main() -> None:
    options = asked(__doc__, tokens=32_768, json=(Path, "append the figures to this file"))
    if options.tokens < WINDOW:
        raise SystemExit(f"--tokens is {options.tokens}; it must be at least {WINDOW}.")
    torch.set_num_threads(1)
    places = [end for end in (1024, 8192, 32_768) if end < options.tokens] + [options.tokens]
    with Progress(transient=True) as progress:
        records = measure(options.tokens, places, progress)
    table = Table("op", "decay", "states", *(f"{end:,} tokens" for end in places))
    for record in records:
        table.add_row(record["op"], record["decay"], record["form"], *(f"{e:.1e}" for e in record["errors"].values()))
    Console().print(table)
    for record in records:
        keep(options.json, {"workload": "drift", "seed": 0, **record})


if __name__ == "__main__":
    main()
