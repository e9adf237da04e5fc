"""The load of a mixture's experts, as metrics and the dashboard show it.

A model may have more experts than anyone wants series for, so neighbours are taken together beyond a bound. Lines of
metrics are written here, because `prometheus_client` would take ten times as long for so many.

Legend:
    L  layers with experts
    E  experts, or groups of neighbours
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.perf.experts import imbalance
from ridgeline.transport.messages import ExpertFigures

MOST_SERIES = 64 * 512
TOKENS = "ridgeline:expert_tokens"
TOKENS_HELP = "Tokens that an expert of a layer got. Beyond 32768 experts in all, neighbours are one series."


@dataclass(frozen=True)
class Load:
    """The load with at most `MOST_SERIES` entries. `each` is how many neighbours an entry is the sum of."""

    layers: list[int]
    tokens_LE: np.ndarray
    each: int
    imbalance: list[float]
    reached: list[int]

    def names(self, experts: int) -> list[str]:
        """Return the labels of the entries of a layer with so many experts: the expert, or the first and the last."""
        ends = [(first, min(first + self.each, experts) - 1) for first in range(0, experts, self.each)]
        return [str(first) if first == last else f"{first}-{last}" for first, last in ends]


def load_of(figures: ExpertFigures) -> Load:
    """Return the load that a message tells."""
    tokens_LE = np.frombuffer(figures.tokens, np.int64).reshape(len(figures.layers), -1)
    imbalances = [imbalance(row_E[:count]) for row_E, count in zip(tokens_LE, figures.experts, strict=True)]
    each = max(1, -(-tokens_LE.size // MOST_SERIES))
    starts = np.arange(0, tokens_LE.shape[1], each)
    return Load(figures.layers, np.add.reduceat(tokens_LE, starts, axis=1), each, imbalances, figures.reached)


def metric_lines(figures: ExpertFigures, labels: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the counter of tokens by layer and expert."""
    yield f"# HELP {TOKENS}_total {TOKENS_HELP}"
    yield f"# TYPE {TOKENS}_total counter"
    load = load_of(figures)
    names = {experts: load.names(experts) for experts in set(figures.experts)}
    fixed = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    for layer, experts, row in zip(load.layers, figures.experts, load.tokens_LE.tolist(), strict=True):
        start = f'{TOKENS}_total{{{fixed},layer="{layer}",expert="'
        for name, count in zip(names[experts], row, strict=False):  # a layer may have fewer than the largest
            yield f'{start}{name}"}} {count}.0'


def shown(figures: ExpertFigures) -> dict[str, Any]:
    """Return the load for the dashboard."""
    load = load_of(figures)
    return {
        "layers": load.layers,
        "each": load.each,
        "tokens": load.tokens_LE.tolist(),
        "imbalance": load.imbalance,
        "reached": load.reached,
        "experts": figures.experts,
    }


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
