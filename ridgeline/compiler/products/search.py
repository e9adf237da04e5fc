"""The space of schedules on Hopper, what they cost by a model, and what a model learns from those that were timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import product as combined
from random import Random
from typing import Any

import torch

from ridgeline.compiler.products.schedule import HopperSchedule

MULTIPROCESSORS, CLOCK = 132, 1.5e9  # of a Hopper that multiplies: its power limit leaves it about this clock
FOURS = 128  # blocks of clusters of four that run at the same time: a group of multiprocessors has a few left over
WGMMA_RATE = 64 * 256 * 16 / 128  # products of a multiprocessor in a cycle: m64n256k16 takes 128 cycles
L2_BYTES = 5.5e12  # in a second, from the second cache to all multiprocessors
STEP_CYCLES, TILE_CYCLES = 30, 900  # of a step of K beside its products; of a tile's begin and end
STORE_BYTES = 40.0  # of results that a multiprocessor writes in a cycle
TILES = (
    (64, 256, 1, False), (128, 128, 2, False), (128, 192, 2, False), (128, 256, 2, False), (256, 128, 2, False),
    (192, 128, 3, False), (192, 192, 3, False), (256, 64, 2, False), (256, 192, 2, False), (64, 256, 2, True),
    (128, 128, 2, True), (64, 192, 2, True), (128, 192, 2, True), (192, 128, 2, True), (64, 256, 3, True),
)  # fmt: skip  # rows, columns, warpgroups, turns
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
CHOICES: dict[str, tuple[Any, ...]] = {
    "stages": (2, 3, 4, 5, 6, 7),
    "cluster": CLUSTERS,
    "raster": (1, 2, 4, 8, 16, 32),
    "staging": (0, 1, 2),
    "running": (0, 1),
    "blocks": (132, 128, 120),
}


def space() -> Iterator[HopperSchedule]:
    """Yield every schedule that a kernel can have."""
    for (rows, columns, warpgroups, turns), rest in combined(TILES, combined(*CHOICES.values())):
        named: dict[str, Any] = dict(zip(CHOICES, rest, strict=True))
        each = HopperSchedule(rows=rows, columns=columns, warpgroups=warpgroups, turns=turns, **named)
        if not each.fault():
            yield each


def neighbours(schedule: HopperSchedule, random: Random) -> Iterable[HopperSchedule]:
    """Yield schedules that differ from one in a choice or two."""
    for _ in range(24):
        other = schedule
        for name in random.sample(["tile", *CHOICES], random.choice((1, 1, 2))):
            if name == "tile":
                rows, columns, warpgroups, turns = random.choice(TILES)
                other = replace(other, rows=rows, columns=columns, warpgroups=warpgroups, turns=turns)
            else:
                other = replace(other, **{name: random.choice(CHOICES[name])})
        if other != schedule and not other.fault():
            yield other


def predicted_seconds(schedule: HopperSchedule, m: int, n: int, k: int) -> float:
    """Return the seconds of a product by counting: the products of a tile, what it reads from the second cache, what it
    writes, what a block waits for where tiles follow each other, and the blocks that are left over in the last wave."""
    s = schedule
    parts = s.cluster[0] * s.cluster[1]
    tiles = math.ceil(m / (s.rows * s.cluster[0])) * math.ceil(n / (s.columns * s.cluster[1])) * parts
    waves = math.ceil(tiles / min(s.blocks, MULTIPROCESSORS if parts < 4 else FOURS))
    steps = math.ceil(k / 64)
    multiply = s.rows * s.columns * 64 / WGMMA_RATE / min(1.0, 0.5 + s.columns / 512 if s.columns < 256 else 1.0)
    read = (s.rows / s.cluster[1] + s.columns / s.cluster[0]) * 128
    deep = min(1.0, (s.stages - 1) / 3)
    copy = read / (L2_BYTES / MULTIPROCESSORS / CLOCK) / deep
    wait = STEP_CYCLES if s.running else 3 * STEP_CYCLES
    store = s.rows * s.columns * 2 / STORE_BYTES * (2.0 if not s.staging else 1.0 + 0.2 / s.staging)
    end = store + TILE_CYCLES
    cycles = waves * steps * (max(multiply, copy) + wait) + end * (1 if s.turns else waves)
    return cycles / CLOCK


def features(schedule: HopperSchedule) -> list[float]:
    """Return the numbers by which the learned model knows a schedule."""
    s = schedule
    tiles = [float((s.rows, s.columns, s.warpgroups, s.turns) == each) for each in TILES]
    clusters = [float(s.cluster == each) for each in CLUSTERS]
    staging = [float(s.staging == each) for each in (0, 1, 2)]
    depth = s.stages * (s.rows + s.columns) / 1536
    raster = math.log2(s.raster)
    return [
        1.0, *tiles, *clusters, *staging, float(s.running), depth, depth * depth, 1 / s.stages, raster,
        raster * raster, raster * clusters[1], raster * clusters[2], (s.blocks - 120) / 12, float(s.turns) * s.running,
    ]  # fmt: skip


class LearnedCost:
    """The counted seconds times what ridge regression learns of the times that were seen: of their logarithm, the part
    that counting misses. It starts as the count alone, and is fitted again when more is seen."""

    def __init__(self, m: int, n: int, k: int, *, stiff: float = 0.3) -> None:
        self._sizes, self._stiff = (m, n, k), stiff
        self._seen: dict[HopperSchedule, float] = {}
        self._weights: torch.Tensor | None = None

    def observe(self, schedule: HopperSchedule, seconds: float) -> None:
        """Take a time. Of several of one schedule the fastest counts."""
        self._seen[schedule] = min(seconds, self._seen.get(schedule, math.inf))
        self._weights = None

    def __call__(self, schedule: HopperSchedule) -> float:
        counted = predicted_seconds(schedule, *self._sizes)
        if schedule.fault() or len(self._seen) < 4:
            return math.inf if schedule.fault() else counted
        if self._weights is None:
            self._weights = self._fitted()
        missed = torch.tensor(features(schedule), dtype=torch.float64) @ self._weights
        return counted * math.exp(float(missed))

    def _fitted(self) -> torch.Tensor:
        x = torch.tensor([features(each) for each in self._seen], dtype=torch.float64)
        y = torch.tensor(
            [math.log(seen / predicted_seconds(each, *self._sizes)) for each, seen in self._seen.items()],
            dtype=torch.float64,
        )
        bound = self._stiff * torch.eye(x.shape[1], dtype=torch.float64)
        bound[0, 0] = 1e-6  # the mean is free
        weights: torch.Tensor = torch.linalg.solve(x.T @ x + bound, x.T @ y)
        return weights


def agreement(predicted: Sequence[float], seen: Sequence[float]) -> float:
    """Return the share of pairs that a model puts in the right order: 0.5 is chance."""
    pairs = [(a, b) for a in range(len(seen)) for b in range(a) if seen[a] != seen[b]]
    right = sum((predicted[a] < predicted[b]) == (seen[a] < seen[b]) for a, b in pairs)
    return right / len(pairs) if pairs else 0.0


def described(schedule: HopperSchedule) -> str:
    """Return a schedule in a line, such as `128x256/2 stages 4 cluster 2x1 raster 8 staging 2 running 1`."""
    s = schedule
    rest = " ".join(
        f"{f.name} {getattr(s, f.name)}"
        for f in fields(s)
        if f.name in ("stages", "raster", "staging", "running", "blocks")
    )
    turns = " in turn" if s.turns else ""
    return f"{s.rows}x{s.columns}/{s.warpgroups}{turns} cluster {s.cluster[0]}x{s.cluster[1]} {rest}"
