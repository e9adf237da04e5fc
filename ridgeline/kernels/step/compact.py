"""Keys and values behind verified trees of drafts: those of the accepted path move together.

The nodes of a tree lie in the cache in the order of the nodes. Once it is known which path through the tree stays, its
keys must lie in the order of their positions, where later steps look for them. The keys hold their positions already,
so they are copied as they are.

Legend:
    R  rows
    S  slots
    C  columns of a block table
    K  tokens that a row emits, at most
    N  block ids
    J  parts of a unit, such as keys and values
    G  key/value heads
    P  tokens per block
    W  words of a head
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.step.units import GroupUnits


def step_compact(slots_R: Tensor, kv_len_R: Tensor, num_logits_R: Tensor, path_RK: Tensor, units: GroupUnits) -> None:
    """Move what is cached of each row's accepted tokens to the places of their positions, in all layers of a cache
    group; in place.

    A row had kv_len_R - num_logits_R tokens before its node 0. What is cached of node path_RK[r, k] moves to the place
    of node k. Where the two are the same, nothing is read or written.

    slots_R, kv_len_R: as of `step_inputs`. num_logits_R: as of `step_verify`.
    path_RK: int32, the `path_RK` of `step_verify`: increasing nodes, and then -1.
    units: [N, J, G, P, W], with any strides but a head's.
    """
    units_NJGPW, block_table_SC, block_size, layers, layer_step = units
    base_R, slots_R = kv_len_R - num_logits_R.long(), slots_R.long()
    ahead_L1 = torch.arange(layers, device=path_RK.device)[:, None] * layer_step
    for k in range(1, path_RK.shape[1]):  # a node's place is read before another one comes there
        node_R = path_RK[:, k].long()
        moves_R = node_R > k
        if not moves_R.any():
            continue
        slot_M = slots_R[moves_R]
        from_M, to_M = base_R[moves_R] + node_R[moves_R], base_R[moves_R] + k
        source_LM, target_LM = (ahead_L1 + block_table_SC[slot_M, place // block_size] for place in (from_M, to_M))
        units_NJGPW[target_LM, :, :, to_M % block_size] = units_NJGPW[source_LM, :, :, from_M % block_size]


STEP_COMPACT = Op(
    "step_compact",
    step_compact,
    (
        Implementation("triton", "ridgeline.kernels.step.triton_compact:step_compact", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.compact:step_compact"),
    ),
)
