"""Cases of sampling, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.base.case import Cases, OpCase, as_cases
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling import parts
from ridgeline.kernels.sampling.cost import best_of_parts_cost, noised_cost, sample_cost
from ridgeline.kernels.sampling.op import SamplingTables


@dataclass(frozen=True)
class SampleCase(OpCase):
    """A greedy choice in `rows` rows of `vocab_size` logits."""

    rows: int
    vocab_size: int

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.vocab_size}"

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return the arguments. Logits are float32 whatever the model's dtype."""
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(self.rows, self.vocab_size, generator=generator, device=device)
        slots = torch.arange(self.rows, device=device)
        tables = SamplingTables.empty(self.rows, self.vocab_size, device)
        return logits, tables, slots, torch.ones_like(slots), Feature.NONE

    def cost(self, itemsize: int) -> Cost:
        return sample_cost(self.rows, self.vocab_size)


class NoisedCase(SampleCase):
    """Noise for the same logits."""

    def cost(self, itemsize: int) -> Cost:
        return noised_cost(self.rows, self.vocab_size)


class ScoreCase(SampleCase):
    """A token of each row whose logprob and rank are asked for."""

    @property
    def slack(self) -> int:
        return 512

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        logits, _, slots, *_ = super().inputs(dtype, device)
        return logits, slots % self.vocab_size, 0


class DrawPartCase(SampleCase):
    """The same logits as the second half of a vocabulary."""

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.vocab_size} of two ranks"

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        logits, _, slots, positions, features = super().inputs(dtype, device)
        tables = SamplingTables.empty(self.rows, 2 * self.vocab_size, device)
        return logits, tables, slots, positions, features, self.vocab_size


class BestOfPartsCase(SampleCase):
    """The winners of two ranks with the same logits."""

    @property
    def label(self) -> str:
        return f"{self.rows} of two ranks"

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        logits, tables, slots, positions, features = super().inputs(dtype, device)
        both = [parts.draw_part(logits[:, part::2], tables, slots, positions, features, 0) for part in (0, 1)]
        return torch.stack(both, 1), tables, slots, positions, features

    def cost(self, itemsize: int) -> Cost:
        return best_of_parts_cost(self.rows, 2)


CASES = (SampleCase(1, 4096), SampleCase(8, 32_000))
REAL = [SampleCase(rows, 128_256) for rows in (1, 64, 256)]

KINDS: dict[str, type[SampleCase]] = {
    "sample": SampleCase,
    "noised": NoisedCase,
    "score_tokens": ScoreCase,
    "draw_part": DrawPartCase,
    "best_of_parts": BestOfPartsCase,
}
OP_CASES = {name: Cases(as_cases(kind, CASES), as_cases(kind, REAL)) for name, kind in KINDS.items()}
