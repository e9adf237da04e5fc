"""Cases of mel spectra, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.case import Cases, OpCase
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.sounds import FRAME, HOP, RATE
from ridgeline.kernels.small.log_mel.cost import log_mel_cost
from ridgeline.kernels.small.log_mel.op import mel_filters


@dataclass(frozen=True)
class LogMelCase(OpCase):
    """A case for tests and benchmarks: windows of noise and a tone."""

    windows: int
    samples: int
    bands: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return samples and filters, float32 whatever the model's dtype."""
        generator = torch.Generator(device).manual_seed(seed)
        noise_NS = 0.1 * torch.randn(self.windows, self.samples, generator=generator, device=device)
        time_S = torch.arange(self.samples, device=device) / RATE
        return noise_NS + 0.2 * torch.sin(2764.6 * time_S), torch.from_numpy(mel_filters(self.bands)).to(device)

    @property
    def label(self) -> str:
        return f"{self.windows}x{self.samples / RATE:g} s, {self.bands} bands"

    @property
    def slack(self) -> int:
        return FRAME  # a quarter of a logarithm of sums over a frame

    def cost(self, itemsize: int) -> Cost:
        return log_mel_cost(self.windows, self.samples, self.bands)


CASES = (LogMelCase(1, 2 * FRAME, 80), LogMelCase(3, 100 * HOP, 128))
REAL = (LogMelCase(1, 30 * RATE, 80), LogMelCase(16, 30 * RATE, 128))

OP_CASES = {"log_mel": Cases(CASES, REAL)}
