"""A listener: what turns sounds into vectors that stand in the place of tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.specs.model import LayerSpec, NormSpec, Product, Sines
from ridgeline.core.specs.stem import STRIDE, GridStem, SoundStem

LONGEST_SOUND = 300  # seconds of a sound that is heard chunk by chunk


@dataclass(frozen=True, kw_only=True)
class ListenerSpec:
    """Whisper's encoder as other models have it: two convolutions, layers whose positions see each other both ways, the
    average of every two, a norm, and a linear map to the model's width.

    stem: the convolutions and the positions, of at most one window.
    chunk: frames that convolutions and layers see together, with positions from zero on. 0: all of a window, and the
        silence behind a sound is heard by the convolutions.
    sines: how the table of positions is computed; None: it is learned.
    window: chunks whose positions see each other in the layers.
    pooled: positions whose average is a vector: 2, or 1.
    hidden: the projector's hidden numbers, with an activation behind them; 0: it is one map.
    longest: frames of the longest sound.
    """

    stem: SoundStem | GridStem
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    outputs: int
    longest: int
    chunk: int = 0
    sines: Sines | None = None
    window: int = 1
    pooled: int = 2
    hidden: int = 0

    @property
    def positions(self) -> int:
        """The positions of the longest sound."""
        return -(-self.longest // STRIDE)

    def positions_of(self, frames: int) -> int:
        """Return the positions that a sound of so many frames has."""
        whole, rest = divmod(frames, self.chunk or self.longest)
        return whole * self.stem.positions_of(self.chunk or self.longest) + self.stem.positions_of(rest)

    @property
    def products(self) -> list[Product]:
        """The matrices of layers and projector."""
        each = [p for layer in self.layers for p in layer.products(self.width).values()]
        if self.hidden:
            return [*each, Product(self.width, self.hidden, True), Product(self.hidden, self.outputs, True)]
        return [*each, Product(self.width, self.outputs, True)]

    @property
    def position_flops(self) -> int:
        """The floating-point operations of a position's matrix products."""
        return 2 * (sum(p.inputs * p.outputs for p in self.products) + self.stem.parameters(self.width)[0])

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        matrices, table, biases = self.stem.parameters(self.width)
        norms = 2 * self.width * (2 * len(self.layers) + 1)
        stem = matrices + biases + (0 if self.sines is not None else table)
        return sum(p.outputs * (p.inputs + p.bias) for p in self.products) + norms + stem

    def scratch(self) -> int:
        """Return the numbers per position that lie between two layers, at most."""
        widest = max((max(layer.mixer.scratch, layer.feed_forward.scratch) for layer in self.layers), default=0)
        return max(4 * self.width + max(widest, self.outputs), self.stem.scratch(self.width))
