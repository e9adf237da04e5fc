"""The tallies of all mixtures of a network, and how the host gets them without waiting for the device.

Once a second the tallies are copied to page-locked memory in front of a step and behind it. Both copies lie in the
step's stream, so they have arrived when the step's result has. Their difference is what the experts got in that step.

Legend:
    L  mixtures
    E  experts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts
from ridgeline.worker.upload import Download


class Tallies:
    """The tallies of a network's mixtures, by layer."""

    def __init__(self, decoder: Decoder) -> None:
        start = 0 if decoder.spec.stage is None else decoder.spec.stage.start
        parts = {index: layer.feed_forward for index, layer in enumerate(decoder.layers, start)}
        mixtures = {index: part for index, part in parts.items() if isinstance(part, Experts)}
        self.layers = tuple(mixtures)
        self.specs = [mixture.spec for mixture in mixtures.values()]
        self._tallies = [mixture.tally_E for mixture in mixtures.values()]

    def __len__(self) -> int:
        return len(self.layers)

    def copy(self) -> Download:
        """Return a copy of the tallies that is on its way to the host."""
        on_gpu = self._tallies[0].is_cuda
        return Download(self._tallies if on_gpu else [tally_E.clone() for tally_E in self._tallies])

    def reset(self) -> None:
        """Forget what was counted."""
        for tally_E in self._tallies:
            tally_E.zero_()

    def load(self, before: Download, after: Download) -> ExpertLoad:
        """Return the load from copies in front of a step and behind it. Both must have arrived."""
        total_LE, step_LE = self._matrix(after), self._matrix(after) - self._matrix(before)
        tokens, share = reach(self.specs, step_LE)
        experts = tuple(spec.routing.experts for spec in self.specs)
        return ExpertLoad(self.layers, experts, total_LE, step_LE, tokens, share)

    def _matrix(self, copy: Download) -> np.ndarray:
        rows = copy.arrays()
        tokens_LE = np.zeros((len(rows), max(map(len, rows), default=0)), np.int64)
        for into_E, row_E in zip(tokens_LE, rows, strict=True):
            into_E[: len(row_E)] = row_E
        return tokens_LE


def reach(specs: Sequence[ExpertsSpec], tokens_LE: np.ndarray) -> tuple[int, float]:
    """Return (the tokens of a step, how many experts of a layer had some divided by how many uniform routing would
    reach), where `tokens_LE` says how many tokens the experts of each layer got in it. The share is 1 where there were
    no tokens."""
    tokens = [counts_E.sum() / spec.routing.top_k for spec, counts_E in zip(specs, tokens_LE, strict=True)]
    uniform = sum(
        touched(count, spec.routing.experts, spec.routing.top_k) for spec, count in zip(specs, tokens, strict=True)
    )
    return round(max(tokens, default=0)), float(np.count_nonzero(tokens_LE)) / uniform if uniform else 1.0
