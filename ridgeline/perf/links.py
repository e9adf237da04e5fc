"""The time of collectives: a line over bytes for each, fitted to measurements, or assumed where there is no
measurement.

A message of n bytes takes α + β n (Hockney, Parallel Computing 20(3), 1994). Bytes are counted as nccl-tests do:

| op | bytes | bus bandwidth ÷ (bytes ÷ seconds), for R ranks |
|---|---|---|
| all_reduce | of the tensor that each rank has | 2 (R - 1) / R |
| all_gather | of what each rank gets in all | (R - 1) / R |
| reduce_scatter | of what each rank brings | (R - 1) / R |
| all_to_all | of what each rank brings | (R - 1) / R |
| send | of one message | 1 |

Legend:
    P  measured points
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.calibration import path_for
from ridgeline.perf.hardware import Hardware

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
ENGINES = ("ours", "nccl", "gloo")  # the ways that the engine's ranks go; others are measured beside them
NOISE = 0.05  # relative residuals beyond it count less (Huber); about what repeated measurements differ by
ROUNDS = 50


def bus_factor(op: str, ranks: int) -> float:
    """Return by how much an op's bus bandwidth exceeds its bytes ÷ seconds."""
    share = (ranks - 1) / ranks
    if op == "all_reduce":
        return 2 * share
    return 1.0 if op == "send" else share


class Line(NamedTuple):
    """The seconds of an op over `ranks` ranks: alpha + beta · bytes.

    backend: what was measured, such as "nccl". largest: the most bytes of a message that it serves.
    error: the median relative difference of the measured points from the line. worst: the largest one.
    points: how many there are; 0 for a line that is assumed.
    """

    op: str
    backend: str
    ranks: int
    alpha: float
    beta: float
    largest: float = math.inf
    error: float = 0.0
    worst: float = 0.0
    points: int = 0

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes

    @property
    def bus(self) -> float:
        """The bus bandwidth, in B/s, that a large message comes near to."""
        return bus_factor(self.op, self.ranks) / self.beta if self.beta else math.inf

    def scaled(self, ranks: int) -> Line:
        """Return the line for another number of ranks: the bus bandwidth stays, and the latency grows with the steps of
        a tree, where ranks do not all send to each other at once. A sum of ours sends all of it to every other rank."""
        if self.backend == "ours":
            steps, more = 1.0, (ranks - 1) / (self.ranks - 1)
        else:
            steps = 1.0 if self.op in ("send", "all_to_all") else math.log2(ranks) / math.log2(self.ranks)
            more = bus_factor(self.op, ranks) / bus_factor(self.op, self.ranks)
        return self._replace(
            ranks=ranks, alpha=self.alpha * steps, beta=self.beta * more, error=0.0, worst=0.0, points=0
        )


@dataclass(frozen=True, kw_only=True)
class Links:
    """The knowledge of the links between the devices of one host.

    source: where the lines come from, in words.
    """

    device: str
    lines: tuple[Line, ...]
    source: str
    date: str = ""
    torch: str = ""
    driver: str = ""
    link: str = ""

    def seconds(self, op: str, ranks: int, nbytes: float) -> float:
        """Return the time of an op by the fastest of the engine's ways; 0 for a single rank."""
        if ranks == 1:
            return 0.0
        lines = self.of(op, ranks)
        within = [line for line in lines if nbytes <= line.largest]
        found = within or [max(lines, key=lambda line: line.largest)]
        return min(line.seconds(nbytes) for line in found)

    def of(self, op: str, ranks: int) -> list[Line]:
        """Return the lines of an op: those of so many ranks, else those of the nearest number, scaled."""
        lines = [line for line in self.lines if line.op == op and line.backend in ENGINES]
        if not lines:
            raise InvalidConfig(f"nothing is known of {op} on {self.device}; measure it with `ridgeline comm bench`.")
        nearest = min({line.ranks for line in lines}, key=lambda known: (abs(known - ranks), known))
        return [line if line.ranks == ranks else line.scaled(ranks) for line in lines if line.ranks == nearest]

    def over(self, other: Links) -> Links:
        """Return these lines, and those of the other for ops that these lack."""
        own = {line.op for line in self.lines if line.backend in ENGINES}
        return replace(self, lines=(*self.lines, *(line for line in other.lines if line.op not in own)))


def fit(op: str, backend: str, ranks: int, points: Iterable[tuple[float, float]]) -> Line:
    """Return the line that is nearest to points (bytes, seconds), by relative differences, so that small messages count
    as much as large ones. Single points far off, by whatever disturbed them, count little (Huber, Annals of
    Mathematical Statistics 35(1), 1964). Neither alpha nor beta is below 0."""
    found = sorted(points)
    if len(found) < 2:
        raise InvalidConfig(f"a line through {op} by {backend} needs at least two sizes; give more --sizes.")
    bytes_P, seconds_P = np.array(found).T
    weight_P, scale_P = np.ones_like(seconds_P), seconds_P
    for _ in range(ROUNDS):
        alpha, beta = _line(bytes_P, seconds_P, np.sqrt(weight_P) / scale_P)
        scale_P = alpha + beta * bytes_P  # differences are relative to the line, not to points that may be far off
        weight_P = NOISE / np.maximum(np.abs(np.log(scale_P / seconds_P)), NOISE)
    off_P = np.abs(scale_P / seconds_P - 1)
    return Line(op, backend, ranks, alpha, beta, found[-1][0], float(np.median(off_P)), float(off_P.max()), len(found))


def _line(bytes_P: NDArray[Any], seconds_P: NDArray[Any], weight_P: NDArray[Any]) -> tuple[float, float]:
    """Return alpha and beta of the least sum of squares of weighted differences."""
    sides_P2, right_P = np.stack([weight_P, weight_P * bytes_P], 1), weight_P * seconds_P
    scale_2 = np.linalg.norm(sides_P2, axis=0)
    alpha, beta = np.linalg.lstsq(sides_P2 / scale_2, right_P, rcond=None)[0] / scale_2
    if alpha >= 0 and beta >= 0:
        return float(alpha), float(beta)
    only = 1 if alpha < 0 else 0  # the best line within the bounds lies on the one that was left
    value = float(sides_P2[:, only] @ right_P / scale_2[only] ** 2)
    return (0.0, value) if only else (value, 0.0)


# ---- what is assumed until it is measured ---------------------------------------------------------------------------

NVLINK = 150e9  # B/s; links that are slower are PCIe or a network
KIB = 1024
NCCL = {  # over NVLink: seconds, and the share of the link's rate
    "all_reduce": (14.5e-6, 0.66),
    "all_gather": (14.0e-6, 0.55),
    "reduce_scatter": (14.0e-6, 0.52),
    "all_to_all": (15.5e-6, 0.63),
    "send": (18.5e-6, 0.66),
}
WORDS = Line("all_reduce", "ours", 2, 1.66e-6, 6.06e-12, largest=256 * KIB)
DIRECT = Line("all_reduce", "ours", 2, 4.96e-6, 3.33e-12, largest=8192 * KIB)
MOST_RANKS = 8  # of one host


def assumed(hardware: Hardware) -> Links:
    """Return lines for a device whose links were not measured here.

    Those of NVLink are fitted to two H200s (18 links each). Ours are fitted to figures in graphs, of 1 to 256 KiB on
    2026-11-24 (median difference 3 %) and of 0.5 to 8 MiB on 2026-11-22 (1 %). NCCL's are fitted to those of up to
    1 MiB in graphs, and from 64 MiB on (2026-11-24, benchmarks/results/h200-communication.jsonl; 5 to 11 %, at most
    22 %). Between these sizes a call outside a graph waits for the host, which no line describes. Messages are measured
    up to 1 MiB alone: beyond, and on other devices and for other numbers of ranks, all of this is an assumption. Those
    of PCIe are what NCCL takes between two H100s that may not use NVLink (2026-11-25, h100-communication.jsonl: 18 to
    26 µs, and 22 to 27 of 64 GB/s). Figures for CPUs are rounder guesses yet.
    """
    rate, both = hardware.interconnect, 2
    if hardware.name == "CPU":
        lines = [_known(op, "gloo", both, 150e-6, 0.2 * rate) for op in OPS]
    elif rate < NVLINK:
        lines = [_known(op, "nccl", both, 20e-6, 0.4 * rate) for op in OPS]
    else:
        lines = [_known(op, "nccl", both, alpha, share * rate) for op, (alpha, share) in NCCL.items()]
        more = [line.scaled(ranks) for ranks in range(both + 1, MOST_RANKS + 1) for line in (*lines, WORDS)]
        lines += [WORDS, DIRECT, *more]  # more than two ranks make no direct sums
    return Links(device=hardware.name, lines=tuple(lines), source="assumed, not measured here")


def ideal(hardware: Hardware) -> Links:
    """Return lines without delay at the whole rate of the links, for limits that no measured step may exceed."""
    both = range(2, MOST_RANKS + 1)
    lines = tuple(_known(op, "ours", ranks, 0.0, hardware.interconnect) for op in OPS for ranks in both)
    return Links(device=hardware.name, lines=lines, source="the rate of the links, without delay")


def _known(op: str, backend: str, ranks: int, alpha: float, bus: float) -> Line:
    return Line(op, backend, ranks, alpha, bus_factor(op, ranks) / bus)


# ---- the store: one file per device, beside its calibration ---------------------------------------------------------


def links_path(device: str, folder: Path | None = None) -> Path:
    """Return the file of a device's lines, whether it exists or not."""
    return path_for(f"{device} links", folder)


def save_links(links: Links, folder: Path | None = None) -> Path:
    """Keep the lines, beside those of other ops, backends and numbers of ranks, and return their file."""
    path = links_path(links.device, folder)
    before = read_links(path).lines if path.exists() else ()
    new = {line[:3] for line in links.lines}
    lines = [*(line for line in before if line[:3] not in new), *links.lines]
    record = {name: getattr(links, name) for name in ("device", "source", "date", "torch", "driver", "link")}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps({**record, "lines": [line._asdict() for line in lines]}, indent=1) + "\n")
    scratch.replace(path)
    return path


def load_links(device: str, folder: Path | None = None) -> Links | None:
    """Return the measured lines of a device's links, or None."""
    path = links_path(device, folder)
    return read_links(path) if path.exists() else None


def read_links(path: Path) -> Links:
    """Return the lines in a file. Raise InvalidConfig if it is damaged."""
    try:
        record = json.loads(path.read_text())
        lines = tuple(Line(**line) for line in record.pop("lines"))
        _check(lines)
        return Links(lines=lines, **record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"{path} is damaged ({error}); delete it and run `ridgeline comm bench --keep`.") from error


def _check(lines: Sequence[Line]) -> None:
    for line in lines:
        numbers = (line.alpha, line.beta, line.largest)
        if line.op not in OPS or line.ranks < 2 or not all(0 <= number < math.inf for number in numbers):
            raise ValueError(f"{line} is no line")
