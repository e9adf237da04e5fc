"""The embedding: rows looked up in a table.

Legend:
    T  tokens
    V  rows of the table
    M  row width
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


def embedding(ids_T: Tensor, weight_VM: Tensor) -> Tensor:
    """Return the rows `ids_T` (int32 or int64, each in 0..V-1) of `weight_VM`: [T, M] in the table's dtype."""
    return weight_VM[ids_T]


def embedding_part(ids_T: Tensor, weight_VM: Tensor, first: int) -> Tensor:
    """Return the rows `ids_T` of a table of which rows `first` … first + V - 1 are here: [T, M], zeros for other
    ids."""
    own_T = ids_T - first
    held_T = (own_T >= 0) & (own_T < len(weight_VM))
    return weight_VM[own_T.where(held_T, 0)].where(held_T[:, None], 0)


EMBEDDING = Op(
    "embedding",
    embedding,
    (
        Implementation("triton", "ridgeline.kernels.small.embedding.triton:embedding", on_gpu),
        Implementation("torch", "torch.nn.functional:embedding"),
        Implementation("training", "ridgeline.kernels.small.embedding.training:embedding"),
    ),
)

EMBEDDING_PART = Op(
    "embedding_part",
    embedding_part,
    (Implementation("triton", "ridgeline.kernels.small.embedding.triton:embedding_part", on_gpu),),
)
