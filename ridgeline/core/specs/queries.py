"""A projector as data that makes a fixed number of vectors of a view, by learned queries: BLIP-2's Q-Former."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.specs.model import ABSENT, LayerSpec, NormSpec, Product
from ridgeline.core.specs.tower import ProjectorSpec


@dataclass(frozen=True, kw_only=True)
class QueriesSpec(ProjectorSpec):
    """Learned queries see each other, and in some layers all of a view's patches, its class token included (Li et al.,
    arXiv 2301.12597). A linear map follows.

    queries: their number, and so that of a view's vectors. query_width: of a query.
    query_layers: their layers, which have norms "around" their parts. Layers of cross attention see the patches.
    query_norm: that of the learned queries.
    words: rows of a table of tokens. Then the queries see the tokens of the prompt's text in all layers, and these the
        queries (InstructBLIP, Dai et al., arXiv 2305.06500). 0: there is no table.
    places: rows of the table of the tokens' positions.
    word_layers: the feed-forwards of tokens, one behind each two of `query_layers`.
    """

    queries: int
    query_width: int
    query_layers: tuple[LayerSpec, ...]
    query_norm: NormSpec
    words: int = 0
    places: int = 0
    word_layers: tuple[LayerSpec, ...] = ()

    def products(self, width: int) -> list[Product]:
        layers = (*self.query_layers, *self.word_layers)
        each = (product for layer in layers for product in layer.products(self.query_width).values())
        found = [product._replace(used=1) for product in each]
        return [*found, Product(self.query_width, self.outputs, self.bias)]

    def made(self, patches: int, views: int) -> int:
        return self.queries * views

    @property
    def vectors(self) -> int:
        layers = (*self.query_layers, *self.word_layers)
        parts = sum((each.mixer is not ABSENT) + (each.feed_forward is not ABSENT) for each in layers)
        return self.query_width * (2 * (1 + parts) + self.queries + self.words + self.places)
