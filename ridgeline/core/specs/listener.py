"""A listener: what turns sounds into vectors that stand in the place of tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.specs.model import ABSENT, LayerSpec, NormSpec, Product, Sines
from ridgeline.core.specs.norm import parameters_of
from ridgeline.core.specs.stem import STRIDE, GridStem, SoundStem

LONGEST_SOUND = 300  # seconds of a sound that is heard chunk by chunk


@dataclass(frozen=True, kw_only=True)
class MarksSpec:
    """Learned vectors behind those of a sound, which pass the last map too (Gemma 3n).

    rows: of their table. norm: theirs, before the map.
    filled: the vectors of every sound; those behind its own are the row `filler`. end: the row of one more behind them.
    """

    rows: int
    norm: NormSpec
    filled: int
    filler: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ListenerSpec:
    """Whisper's encoder as other models have it: two convolutions, layers whose positions see each other both ways, the
    average of every two, a norm, and a linear map to the model's width. Or a conformer.

    stem: the convolutions and the positions, of at most one window.
    norm: behind the layers; None: there is none.
    chunk: frames that convolutions and layers see together, with positions from zero on. 0: all of a window, and the
        silence behind a sound is heard by the convolutions.
    sines: how the table of positions is computed; None: it is learned, or there is none.
    window: chunks whose positions see each other in the layers.
    row: positions that layers see together of a longer sound, whose last row is filled up with zeros; 0: they see all.
    pooled: positions whose average is a vector: 2, or 1.
    block: so many layers are one of the checkpoint's, and `block_norm` follows them in place of the residual. 0: each
        is one.
    clipped: the layers' linear maps clip their inputs and outputs to learned bounds, four of each projection.
    hidden: the projector's hidden numbers; 0: it is one map. between: the norm behind the first map; None: an
        activation is there.
    out_bias: the last map has a bias. behind: the norm behind it.
    every: so many positions are one vector, the first of them. marks: what stands behind a sound; None: nothing.
    apart: there is another projector for sounds that stand beside pictures in a prompt.
    longest: frames of the longest sound.
    """

    stem: SoundStem | GridStem
    width: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    outputs: int
    longest: int
    chunk: int = 0
    sines: Sines | None = None
    window: int = 1
    row: int = 0
    pooled: int = 2
    block: int = 0
    block_norm: NormSpec | None = None
    clipped: bool = False
    hidden: int = 0
    between: NormSpec | None = None
    out_bias: bool = True
    behind: NormSpec | None = None
    every: int = 1
    marks: MarksSpec | None = None
    apart: bool = False

    @property
    def positions(self) -> int:
        """The positions of the longest sound."""
        return -(-self.longest // STRIDE)

    def positions_of(self, frames: int) -> int:
        """Return the positions that a sound of so many frames has."""
        if not self.chunk:
            return self.stem.positions_of(frames)
        whole, rest = divmod(frames, self.chunk)
        return whole * self.stem.positions_of(self.chunk) + self.stem.positions_of(rest)

    @property
    def projectors(self) -> int:
        """The number of projectors, of which a sound passes one."""
        return 2 if self.apart else 1

    @property
    def products(self) -> list[Product]:
        """The matrices of layers and projector."""
        each = [p for layer in self.layers for p in layer.products(self.width).values()]
        if self.hidden:
            last = Product(self.hidden, self.outputs, self.out_bias)
            return [*each, Product(self.width, self.hidden, True), last]
        return [*each, Product(self.width, self.outputs, self.out_bias)]

    @property
    def position_flops(self) -> int:
        """The floating-point operations of a position's matrix products."""
        used = sum(p.inputs * p.outputs * p.used for p in self.products)
        return 2 * (used + self.stem.parameters(self.width)[0])

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        matrices, table, biases = self.stem.parameters(self.width)
        stem = matrices + biases + (0 if self.sines is not None else table)
        total = sum(p.outputs * (p.inputs + p.bias) for p in self.products)
        if self.apart:
            total += sum(p.outputs * (p.inputs + p.bias) for p in self.products[-2 if self.hidden else -1 :])
        norms = [(norm, self.width) for norm in (self.norm,) if norm is not None]
        for layer in self.layers:
            present = (layer.mixer is not ABSENT) + (layer.feed_forward is not ABSENT)
            norms += [(layer.norm, self.width)] * (present * (2 if layer.norms == "both" else 1))
            norms += layer.mixer.norms
            total += layer.mixer.vectors
        if self.marks is not None:
            total += self.marks.rows * self.width
            norms.append((self.marks.norm, self.width))
        if self.block and self.block_norm is not None:
            norms += [(self.block_norm, self.width)] * (len(self.layers) // self.block)
        if self.clipped:
            total += 4 * sum(_projections(layer) for layer in self.layers)
        return total + stem + sum(parameters_of(norm, width) for norm, width in norms)

    def scratch(self) -> int:
        """Return the numbers per position that lie between two layers, at most."""
        widest = max((max(layer.mixer.scratch, layer.feed_forward.scratch) for layer in self.layers), default=0)
        return max(4 * self.width + max(widest, self.outputs), self.stem.scratch(self.width))


def _projections(layer: LayerSpec) -> int:
    """Return the projections of a layer whose linear maps clip: those of distances do not."""
    names = {**layer.mixer.products(1), **layer.feed_forward.products(1)}
    return sum(3 if name == "qkv" else 1 for name in names if name != "distances")
