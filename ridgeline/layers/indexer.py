"""The indexer of sparse attention: small queries, keys and weights, by which a token chooses those it attends to.

Legend:
    T  tokens of the step
    M  model width
    I  heads of the indexer
    D  width of its keys
    X  numbers that queries are made of
    K  tokens that are chosen
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ridgeline.core.specs.latent import IndexerSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


@dataclass
class Index:
    """A layer's projections for its choice, neither normalised nor rotated.

    weights_TI: those of the heads' scores, with the spec's scale.
    norm_2D: weight and bias of the keys' norm.
    chosen_TK: what was chosen for those tokens of the step that choose, for later layers; None: nothing yet.
    """

    spec: IndexerSpec
    q_TID: Tensor
    key_TD: Tensor
    weights_TI: Tensor
    norm_2D: tuple[Tensor, Tensor]
    chosen_TK: Tensor | None = None


class Indexer(nn.Module):
    """The products of an `IndexerSpec`. Every rank has all of them, since all heads attend to the same tokens."""

    def __init__(self, spec: IndexerSpec, width: int, query_rank: int, build: Build) -> None:
        super().__init__()
        self.spec, build = spec, build.within("indexer")
        self.query = Linear(query_rank, (spec.heads * spec.dim,), False, build.within("query"))
        self.key = Linear(width, (spec.dim,), False, build.within("key"))
        self.weights = Linear(width, (spec.heads,), False, build.within("weights"))
        self.norm = Norm(spec.norm, spec.dim, build)
        self.requires_grad_(False)  # a choice has no gradient

    def forward(self, n_TM: Tensor, q_TX: Tensor) -> Index:
        """Return the projections of the step's tokens. n_TM: the layer's input behind its norm. q_TX: what queries of
        attention are made of, behind its norm."""
        assert self.norm.bias is not None
        q_TID = self.query(q_TX).unflatten(-1, (self.spec.heads, -1))
        weights_TI = self.weights(n_TM).float() * self.spec.scale
        return Index(self.spec, q_TID, self.key(n_TM), weights_TI, (self.norm.weight, self.norm.bias))
