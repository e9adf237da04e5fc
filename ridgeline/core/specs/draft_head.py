"""Heads that draft tokens from the hidden states of the model whose next tokens they guess, as data.

`models/draft_heads.py` turns a config.json into one of these; `layers/draft_head.py` and `layers/medusa.py` turn it
into a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, WeightMap


@dataclass(frozen=True, kw_only=True)
class DraftHeadSpec:
    """A network of a layer or a few that goes on from hidden states (EAGLE, multi-token prediction).

    A position holds a pair: what the target found of token i, which is called its feature, and token i + 1. Behind it
    the head scores token i + 2, and its output takes the place of the feature that is not known yet.

    width: that of the target's hidden states, and of its own.
    layers: its own, which keep keys and values as the target's do.
    taps: the target's layers whose outputs one product joins to a feature; (): the feature is what the target's final
        norm returns.
    joined: the place where embedding and feature meet. "product": one product in front of the layers. "attention": the
        first layer's attention reads both, and the feature alone is the residual.
    entry_norm: normalizes embedding and feature, each with a weight of its own, before they meet; None: neither.
    entry_bias: the product in front of the layers has a bias.
    normed_residual: where they meet in the attention, the residual is the normalized feature.
    final_norm: the norm in front of the scores; None: the output is scored as it is.
    carries_norm: what takes the feature's place is behind that norm.
    scored: rows of an output matrix of its own; 0: the target's scores.
    narrow: these rows are some of the vocabulary's tokens, which the checkpoint names.
    """

    width: int
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...] = ()
    joined: Literal["product", "attention"] = "product"
    entry_norm: NormSpec | None = None
    entry_bias: bool = False
    normed_residual: bool = False
    final_norm: NormSpec | None = None
    carries_norm: bool = False
    scored: int = 0
    narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """Heads that each guess the token at one distance from the target's last hidden state (Cai et al., arXiv
    2401.10774).

    width: that of the target's hidden states.
    heads: the first one guesses the token behind the next.
    blocks: products of each head, which add to their input.
    bias: these products have a bias.
    scored: rows of an output matrix of each head's own; 0: all take the target's.
    """

    width: int
    heads: int
    blocks: int
    bias: bool
    scored: int = 0
    layers: tuple[LayerSpec, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MarkovSpec:
    """The part of a head that changes a token's scores by the token drafted before it (DSpark): a product of two
    narrow matrices, whose rows belong to tokens.

    kind: "vanilla": the row of the token before is multiplied. "gated": it is first multiplied by a gate, which the
        head's output and the row make. "rnn": a recurrent state does it, which goes through the block.
    rank: the width of the row.
    """

    kind: Literal["vanilla", "gated", "rnn"]
    rank: int


@dataclass(frozen=True, kw_only=True)
class ConfidenceSpec:
    """The part of a head that tells how probably a draft is right if all before it are (DSpark): one product of the
    head's output at the draft's place.

    markov: the product reads the Markov head's row of the token before besides.
    bias: it has a bias.
    """

    markov: bool
    bias: bool


@dataclass(frozen=True, kw_only=True)
class DraftBlockSpec:
    """A network that guesses the tokens of a block at once (DFlash, arXiv 2602.06036; DSpark).

    It reads the last token, and a mask in the place of each token to come. Its layers' keys and values of all tokens
    before are projections of what the target found of them, which is called their context.

    width, layers, taps, final_norm, scored, narrow: as in `DraftHeadSpec`.
    block: the tokens of a block, the last known one included, with which the head was trained.
    mask: the token that stands for those to come.
    own_mask: a vector of the checkpoint takes the place of that token's embedding.
    shifted: behind each place the token of the next place is scored. Otherwise it is the place's own.
    causal: the layers in which a place sees none of the block's places behind it.
    context_norm: normalizes the context.
    embed_scale: multiplies the target's embedded tokens.
    markov: what the token before adds to scores; None: nothing.
    confidence: what tells how probably drafts are right; None: nothing does.
    """

    width: int
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]
    block: int
    mask: int
    context_norm: NormSpec
    final_norm: NormSpec
    own_mask: bool = False
    shifted: bool = False
    causal: Literal["none", "windows", "all"] = "none"
    embed_scale: float = 1.0
    markov: MarkovSpec | None = None
    confidence: ConfidenceSpec | None = None
    scored: int = 0
    narrow: bool = False

    @property
    def most(self) -> int:
        """The drafts that a block holds."""
        return self.block if self.shifted else self.block - 1


HeadSpec = DraftHeadSpec | DraftBlockSpec | MedusaSpec


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head, and the checkpoint tensors that fill its parameters.

    unused: beginnings of the names of tensors that the files hold besides.
    """

    spec: HeadSpec
    weights: WeightMap
    unused: tuple[str, ...] = ()


def size_of(head: HeadSpec, target: ModelSpec) -> ModelSpec:
    """Return a model of the head's layers, by which the memory of its cache and of its steps is planned."""
    return replace(
        target,
        layers=head.layers,
        vocab_size=max(1, head.scored),
        tie_word_embeddings=True,
        learned_positions=0,
        embed_norm=None,
        unused=(),
    )
