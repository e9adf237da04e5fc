"""The choice of experts for tokens as data, and which experts have no gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PRODUCTS = "products"  # stands for no activation: what experts' first matrices give
UNGATED = ("relu2", PRODUCTS)  # activations of experts that have no gate


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """The choice of `top_k` of `experts` for a token, and how much each of them counts.

    The router's products become scores: their softmax over all experts, or the sigmoid of each. The experts with the
    largest score plus correction are chosen. Their weights are the scores alone.

    score: "softmax", "sigmoid", or "sparsemixer" (Liu et al., arXiv 2409.12136). With the last, the products are the
        scores. An expert's weight is its share in a softmax over the experts that were not chosen before it and are
        near it: those of scores s with (its score - s) / max(|s|, its score) of at most `nearness`.
    renormalize: the weights of a token are divided by their sum.
    scale: multiplies the weights after that.
    groups: experts lie in so many groups of equal size, of which a token may use `top_groups`: those with the largest
        group score. That is the largest score in the group ("max"), or the sum of its two largest ("top2").
    bias: the router has a bias.
    correction: a bias that is added to the scores for the choice alone (Wang et al., arXiv 2408.15664).
    expert_scale: a learned factor on each expert's weight.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    nearness: float = 0.0
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False
    correction: bool = False
    expert_scale: bool = False
