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
from ridgeline.kernels.step.persistent.tasks import StepSchedule

MARK = -1  # as a 16-bit number: a NaN that no rounding gives


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

    def address(self, name: str) -> int:
        """Return the address of a buffer, by its name in a schedule without marks."""
        tensors = {
            "residual": self.residual_RM, "qkv": self.qkv_RX, "attended": self.attended_RI,
            "partial": self.partial_RHSD, "gated": self.gated_RF, "logits": self.logits_RV,
        }  # fmt: skip
        return tensors[name].data_ptr()

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


class MarkedBuffers:
    """The marked buffers of a schedule, twice: a step uses one set of them, and fills the other one with marks.

    memory: int16 [2, numbers of a set], full of marks. like: buffers of the same step, whose sizes they have.
    """

    def __init__(self, schedule: StepSchedule, like: StepBuffers) -> None:
        sizes = {
            "residual": like.residual_RM, "qkv": like.qkv_RX, "attended": like.attended_RI,
            "partial": like.partial_RHSD, "gated": like.gated_RF,
        }  # fmt: skip
        self._places, self._like, end = dict[str, int](), like, 0
        for name in sorted(schedule.marked):
            self._places[name] = end
            end += -(-sizes[name.partition(".")[0]].nbytes // 16) * 16
        self.memory = torch.full((2, end // 2), MARK, dtype=torch.int16, device=like.logits_RV.device)

    @property
    def set_bytes(self) -> int:
        return self.memory[0].nbytes

    def address(self, name: str) -> int:
        """Return the address of a buffer in the first set, or of one that is not marked."""
        if name not in self._places:
            return self._like.address(name)
        return self.memory.data_ptr() + self._places[name]
