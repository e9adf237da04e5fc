"""The tensors of a persistent step: weights, what a step is given, and the buffers between its tasks.

Legend:
    R  rows
    M  model width
    X  (H + 2 G) D, columns of the fused projection
    I  numbers of all query heads, H D
    H  query heads
    G  key/value heads
    D  head width
    F  intermediate width
    V  vocabulary
    Z  rows of the table of angles
    Y  rotated width
    N  blocks of the cache
    P  tokens per block
    C  columns of a block table
    S  splits of a row's keys; of the block table, slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.step.persistent.shape import DenseShape


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The weights of a layer, in the model's dtype. Gates come before the others in gate_up."""

    mixer_norm_M: Tensor
    qkv_XM: Tensor
    qkv_bias_X: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    out_MI: Tensor
    feed_forward_norm_M: Tensor
    gate_up_2FM: Tensor
    down_MF: Tensor


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """All weights. cos_sin_ZY: float32, as in `kernels/small/rotary/op.py`."""

    embedding_VM: Tensor
    layers: Sequence[LayerWeights]
    norm_M: Tensor
    head_VM: Tensor
    cos_sin_ZY: Tensor


@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """The inputs of a step.

    tokens_R: int64. positions_R: int64, of these tokens.
    live_R: bool, False for a row without a request.
    slots_R: int32, the row of table_SC with a row's blocks, which are int32.
    caches: by layer keys and values [N, G, P, D]. Heads of a block lie behind each other, as do tokens of a head.
    """

    tokens_R: Tensor
    positions_R: Tensor
    live_R: Tensor
    slots_R: Tensor
    table_SC: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """The buffers between tasks. partial_RHSD: float32, of each split of a head's keys sums, the largest score and the
    sum of weights, and two numbers that are not used: D + 4."""

    residual_RM: Tensor
    qkv_RX: Tensor
    attended_RI: Tensor
    partial_RHSD: Tensor
    gated_RF: Tensor
    logits_RV: Tensor

    @staticmethod
    def poisoned(shape: DenseShape, rows: int, splits: int, like: Tensor) -> StepBuffers:
        """Return buffers full of NaN, so that a number that no task wrote shows. like: has their dtype and device."""

        def empty(*size: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.full((rows, *size), torch.nan, dtype=dtype, device=like.device)

        return StepBuffers(
            residual_RM=empty(shape.width), qkv_RX=empty(shape.projected), attended_RI=empty(shape.attended),
            partial_RHSD=empty(shape.heads, splits, shape.head_dim + 4, dtype=torch.float32),
            gated_RF=empty(shape.inner), logits_RV=empty(shape.vocabulary),
        )  # fmt: skip
