"""Layers of several residual streams, of which they run one and correct the others (Gemma 3n).

"Alternating Updates for Efficient Transformers" (Baykal et al., arXiv 2301.13310) has the streams; the low-rank addend
beside attention is that of "LAUREL: Learned Augmented Residual Layer" (Menghani et al., arXiv 2411.07501).

Legend:
    T  tokens of the step
    N  streams
    M  model width
    P  width of a layer's input
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.model import LayerSpec, StreamsSpec
from ridgeline.layers import kinds
from ridgeline.layers.build import Build
from ridgeline.layers.layer_inputs import LayerInput
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm

LEAST = 1e-5  # the least mean square that a stream is divided by


class Streams(nn.Module):
    """The streams of embedded tokens, and the one vector that is made of them behind the last layer.

    parts: the rows of each stream's map, in either tensor.
    """

    def __init__(self, spec: StreamsSpec, width: int, build: Build) -> None:
        super().__init__()
        self._count = spec.count
        self.parts = (width,) * (spec.count - 1)
        self.spread = build.parameter((spec.count - 1) * width, width)
        self.merge = build.parameter((spec.count - 1) * width, width)

    def spread_out(self, x_TM: Tensor) -> Tensor:
        """Return the streams of embedded tokens: [T, N, M]."""
        others = (F.linear(x_TM, weight_MM) for weight_MM in self.spread.split(self.parts))
        return torch.stack((x_TM, *(_as_large(other_TM, x_TM) for other_TM in others)), dim=1)

    def merged(self, x_TNM: Tensor) -> Tensor:
        """Return the mean of the streams, each mapped and made as large as the first one: [T, M]."""
        first_TM, *others = x_TNM.unbind(1)
        pairs = zip(others, self.merge.split(self.parts), strict=True)
        made = (_as_large(F.linear(other_TM, weight_MM), first_TM) for other_TM, weight_MM in pairs)
        return torch.stack((first_TM, *made)).mean(0)


def _as_large(x_TM: Tensor, other_TM: Tensor) -> Tensor:
    """Return x with the magnitudes of `other`."""
    wanted_T1 = other_TM.float().square().mean(-1, keepdim=True).sqrt()
    own_T1 = x_TM.float().square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
    return (x_TM.float() * wanted_T1 / own_T1).to(x_TM.dtype)


class StreamsLayer(nn.Module):
    """A mixer and a feed-forward of one stream, from which the others are corrected."""

    def __init__(self, spec: LayerSpec, width: int, build: Build) -> None:
        super().__init__()
        assert spec.streams is not None
        assert spec.inputs is not None
        self.spec, self._streams = spec, spec.streams
        count, rank = spec.streams.count, spec.streams.rank
        self.mixer_norm, self.mixer_post_norm = (Norm(spec.norm, width, build) for _ in range(2))
        self.feed_forward_norm, self.feed_forward_post_norm = (Norm(spec.norm, width, build) for _ in range(2))
        self.mixer = kinds.mixer(spec.mixer, width, build.within("mixer"))
        self.feed_forward = kinds.feed_forward(spec.feed_forward, width, build.within("feed_forward"))
        self.layer_input = LayerInput(spec.inputs, spec.norm, width, build.within("layer_input"))
        self.laurel_in = Linear(width, (rank,), False, build.within("laurel_in"))
        self.laurel_out = Linear(rank, (width,), False, build.within("laurel_out"))
        self.laurel_norm = Norm(spec.norm, width, build)
        self.router_norm = Norm(spec.norm, width, build)
        self.router = build.parameter(count, width)
        self.predict = build.parameter(count * count, count)
        self.correct = build.parameter(count, count)
        self.corrected_scale = build.parameter(width)

    def forward(
        self,
        x_TNM: Tensor,
        residual: None,
        positions_T: Tensor,
        state: Any,
        live_T: Tensor | None,
        embedded_TM: Tensor | None,
        input_TP: Tensor,
    ) -> tuple[Tensor, None]:
        """Return (the streams behind this layer, None). residual: there is none beside the streams."""
        active = self._streams.active
        predicted_TNM = self._predicted(x_TNM)
        x_TM = predicted_TNM[:, active]
        n_TM, _ = self.mixer_norm(x_TM.contiguous())
        mixed_TM, _ = self.mixer(None, n_TM, None, positions_T, state)
        laurel_TM = n_TM + self.laurel_norm(self.laurel_out(self.laurel_in(n_TM)))[0]
        x_TM = (x_TM + self.mixer_post_norm(mixed_TM)[0] + laurel_TM) / math.sqrt(2)
        y_TM, _ = self.feed_forward(self.feed_forward_norm, x_TM, None, live_T)
        x_TNM = self._corrected(predicted_TNM, x_TM + self.feed_forward_post_norm(y_TM)[0])
        first_TM = x_TNM[:, active]
        scaled_TM = first_TM * self.corrected_scale if self._streams.scaled else first_TM
        added_TM = self.layer_input(scaled_TM.contiguous(), input_TP)
        return torch.cat((x_TNM[:, :1], x_TNM[:, 1:] + added_TM[:, None]), dim=1), None

    def _modalities(self, x_TM: Tensor) -> Tensor:
        n_TM = self.router_norm(x_TM.contiguous())[0] / x_TM.shape[1]
        return torch.tanh(F.linear(n_TM, self.router).float()).to(x_TM.dtype)

    def _predicted(self, x_TNM: Tensor) -> Tensor:
        """Return the streams plus mixtures of them, as the active one says."""
        count = self._streams.count
        factor_TNN = F.linear(self._modalities(x_TNM[:, self._streams.active]), self.predict).view(-1, count, count)
        return torch.bmm(factor_TNN, x_TNM) + x_TNM

    def _corrected(self, predicted_TNM: Tensor, x_TM: Tensor) -> Tensor:
        """Return the predictions plus parts of how far the active stream is from its own."""
        factor_TN = F.linear(self._modalities(x_TM), self.correct) + 1
        missed_TM = x_TM - predicted_TNM[:, self._streams.active]
        return predicted_TNM + factor_TN[:, :, None] * missed_TM[:, None]
