"""A tower as data that sees a picture as tiles of one size: Llama 3.2 Vision's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.specs.model import LayerSpec, Product
from ridgeline.core.specs.tower import TowerSpec

FILLED = 8  # patches of a tile are filled up to a multiple of this, as in the model's training


@dataclass(frozen=True, kw_only=True)
class TiledTowerSpec(TowerSpec):
    """A tower for pictures of up to `tiles` tiles, each of side x side patches behind a class token.

    All patches of all tiles see each other. A picture has places for all tiles, and the patches of a tile are filled
    up to a multiple of `FILLED`. What is filled up is seen too, and itself sees real patches alone.

    layers: those that come first. global_layers: the others, behind `final_norm` and further embeddings of tiles.
    taps: of the first layers, those whose outputs the projector gets besides that of the last one.
    shapes: (rows, columns) of tiles that a picture may have. Row n + 1 of the tables of tiles' embeddings is that of
        shape n.
    """

    tiles: int
    side: int
    shapes: tuple[tuple[int, int], ...]
    global_layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]

    @property
    def patches(self) -> int:
        """The vectors of a tile."""
        return self.side**2 + 1

    @property
    def filled(self) -> int:
        """The places of a tile."""
        return -(-self.patches // FILLED) * FILLED

    @property
    def most_vectors(self) -> int:
        """The vectors of a picture of all tiles."""
        return self.tiles * self.patches

    @property
    def read(self) -> int:
        return self.width * (1 + len(self.taps))

    def rows_of(self, views: Sequence[int]) -> list[int]:
        """Return the places of as many pictures as have so many tiles at least."""
        return [self.tiles * self.filled] * -(-len(views) // self.tiles)

    @property
    def every_layer(self) -> tuple[LayerSpec, ...]:
        return (*self.layers, *self.global_layers)

    @property
    def patch_flops(self) -> int:
        """The floating-point operations of a picture's matrix products, for each patch of one with all tiles. Pictures
        of fewer tiles take as many."""
        each = sum(p.inputs * p.outputs for layer in self.every_layer for p in layer.products(self.width).values())
        each += sum(p.inputs * p.outputs for p in self.projector.products(self.read))
        return 2 * (self.patch_width * self.width + each)

    @property
    def parameters(self) -> int:
        products = [p for layer in self.every_layer for p in layer.products(self.width).values()]
        products += self.projector.products(self.read)
        products.append(Product(self.patch_width, self.width, self.patch_bias))
        total = sum(p.outputs * (p.inputs + p.bias) for p in products)
        norms = 2 * len(self.every_layer) + (self.embed_norm is not None) + (self.final_norm is not None)
        total += norms * 2 * self.width + 2 * len(self.global_layers)
        tables = (len(self.shapes) + 1) * self.tiles * (self.patches + 2) + self.patches + 1
        return total + tables * self.width + 3

    def scratch(self) -> int:
        kept = len(self.taps) * self.width
        widest = max(max(each.mixer.scratch, each.feed_forward.scratch) for each in self.every_layer)
        return self.patch_width + 4 * self.width + kept + max(widest, self.read + self.projector.outputs)
