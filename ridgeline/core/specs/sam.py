"""A tower as data whose patches see each other in windows, with scores by their distance in rows and columns, and whose
output is halved twice and read by layers of another kind: DeepSeek-OCR's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from ridgeline.core.specs.model import LayerSpec, NormSpec, Product
from ridgeline.core.specs.norm import parameters_of
from ridgeline.core.specs.tower import TowerSpec

TAPS = 3  # of convolutions along each axis
SHRINKS = 4  # patches along each axis that become one place
NORM = NormSpec(kind="layer", eps=1e-6)  # of the convolutions' channels


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """The layers that read what is left of a view's patches.

    width: of the layers, and of what they read.
    side: a class token stands before the places, which have learned positions of a grid of side x side. What the
        projector gets of each place is the layers' output behind what they read. 0: learned queries follow the places
        instead, as many, and the projector gets the outputs of these. Places see all places, and a query these and the
        queries before it (DeepSeek-OCR 2).
    queries: the numbers of queries of which there is a table.
    embed_norm: before the layers. final_norm: behind them.
    """

    width: int
    layers: tuple[LayerSpec, ...]
    side: int = 0
    queries: tuple[int, ...] = ()
    embed_norm: NormSpec | None = None
    final_norm: NormSpec | None = None

    @property
    def read(self) -> int:
        """The numbers of a place that the projector gets."""
        return self.width * (2 if self.side else 1)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        products = [p for layer in self.layers for p in layer.products(self.width).values()]
        total = sum(p.outputs * (p.inputs + p.bias) for p in products)
        rows = self.side**2 + 2 if self.side else sum(self.queries)  # a class token has a position too
        norms = [norm for norm in (self.embed_norm, self.final_norm) if norm is not None]
        norms += [layer.norm for layer in self.layers for _ in range(2)]
        return total + rows * self.width + sum(parameters_of(each, self.width) for each in norms)


@dataclass(frozen=True, kw_only=True)
class SamTowerSpec(TowerSpec):
    """The image encoder of Segment Anything (Kirillov et al., arXiv 2304.02643) and what reads its output (Wei et al.,
    arXiv 2510.18234). Views are squares of up to `grid.side` patches to a side, a multiple of four.

    window: of so many patches to a side; those at the right and at the bottom are filled up, and what fills up is seen.
    neck: channels of the two convolutions behind the layers. halved: of the two that halve both sides of the view.
    reader: the layers that read the last of them.
    lined: one vector ends lines of places, and another one stands behind a picture's last view; otherwise there is the
        latter alone.
    """

    neck: int
    halved: tuple[int, int]
    reader: ReaderSpec
    lined: bool

    @property
    def read(self) -> int:
        return self.reader.read

    @property
    def convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """The inputs, outputs, taps along an axis, and patches of a place, of each convolution."""
        first, second = self.halved
        yield self.width, self.neck, 1, 1
        yield self.neck, self.neck, TAPS, 1
        yield self.neck, first, TAPS, SHRINKS
        yield first, second, TAPS, SHRINKS**2

    @property
    def patch_flops(self) -> int:
        each = sum(p.inputs * p.outputs for layer in self.layers for p in layer.products(self.width).values())
        convolved = sum(i * o * taps**2 / shrunk for i, o, taps, shrunk in self.convolutions)
        layers = self.reader.layers
        read = sum(p.inputs * p.outputs for layer in layers for p in layer.products(self.reader.width).values())
        last = self.reader.read * self.projector.outputs + read * (1 if self.reader.side else 2)
        return 2 * int(self.patch_width * self.width + each + convolved + last / SHRINKS**2)

    @property
    def parameters(self) -> int:
        products = [p for layer in self.layers for p in layer.products(self.width).values()]
        products += [Product(self.patch_width, self.width, self.patch_bias)]
        products += [Product(self.read, self.projector.outputs, self.projector.bias)]
        total = sum(p.outputs * (p.inputs + p.bias) for p in products) + self.rows * self.width
        total += sum(2 * parameters_of(each.norm, self.width) + each.mixer.vectors for each in self.layers)
        total += sum(i * o * taps**2 for i, o, taps, _ in self.convolutions) + 2 * parameters_of(NORM, self.neck)
        return total + self.reader.parameters + (1 + self.lined) * self.projector.outputs

    def scratch(self) -> int:
        """Return the numbers per patch that lie between two layers, at most."""
        heads = self.layers[0].attention.num_heads
        wide = 3 * heads * (self.layers[0].attention.head_dim + 2 * self.grid_side)
        widest = max(max(layer.mixer.scratch + wide, layer.feed_forward.scratch) for layer in self.layers)
        return self.patch_width + 4 * self.width + widest

    @property
    def grid_side(self) -> int:
        """The patches along an axis of the largest view."""
        assert self.grid is not None
        return self.grid.side

    def windows_of(self, views: Sequence[int]) -> list[int]:
        """Return the places of each window, those that fill up included, of square views of so many patches each."""
        return [self.window**2] * sum((-(-isqrt(each) // self.window)) ** 2 for each in views)
