"""Conclusions from how many tokens each expert gets: imbalance, tiles that are filled, tokens that a capacity would
drop, and what experts that lie on several devices would send.

Legend:
    L  layers
    E  experts
    K  experts of a token
"""

from __future__ import annotations

from math import ceil, comb

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec


def imbalance(tokens_E: ArrayLike) -> float:
    """Return the tokens of the busiest expert, divided by the mean: 1 is balanced; E / K, where all tokens choose the
    same K experts, is collapse. 0 if there were no tokens."""
    counts_E = np.asarray(tokens_E, np.float64)
    return float(counts_E.max() / counts_E.mean()) if counts_E.any() else 0.0


def utilization(tokens_E: ArrayLike, tile: int) -> float:
    """Return the share of the rows of tiles that hold pairs, where each expert's pairs are multiplied in tiles of
    `tile` rows. The last tile of each expert is only partly filled (MegaBlocks, Gale et al., arXiv 2211.15841)."""
    counts_E = np.asarray(tokens_E, np.int64)
    rows = int((-(-counts_E // tile) * tile).sum())
    return float(counts_E.sum() / rows) if rows else 1.0


def capacity(factor: float, tokens: int, experts: int, used: int) -> int:
    """Return the most tokens of a batch that an expert takes, where a capacity limits it (GShard, Lepikhin et al.,
    arXiv 2006.16668; Switch Transformer, Fedus et al., arXiv 2101.03961)."""
    return ceil(round(factor * tokens * used / experts, 9))


def dropped(tokens_E: ArrayLike, capacity: int) -> int:
    """Return the number of pairs beyond the capacity. Those models compute a batch without them."""
    return int(np.maximum(np.asarray(tokens_E, np.int64) - capacity, 0).sum())


def devices_of_token(experts: int, used: int, devices: int) -> float:
    """Return the number of devices on which a token's experts lie, on average, if it chooses uniformly and each device
    has an equal part of the experts."""
    if devices == 1:
        return 1.0
    return devices * (1 - comb(experts - experts // devices, used) / comb(experts, used))


def exchanged_bytes(model: ModelSpec, devices: int, itemsize: float) -> float:
    """Return the bytes that one token makes a device send in one forward pass, and as many again that come back, if
    the experts of each layer are divided over `devices`.

    The token's row goes once to every other device that has an expert of it, and the sum over that device's experts
    comes back. Routing is taken to be uniform.
    """
    mixtures = [layer.feed_forward.routing for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    others = sum(
        devices_of_token(how.experts, how.top_k, devices) * (devices - 1) / devices for how in mixtures
    )  # by symmetry one in `devices` of them is the token's own
    return others * model.hidden_size * itemsize
