"""An embedding lookup that does not break a chain of dependent launches. The legend is that of op.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.embedding import op

BLOCK = 1024  # columns of a program


@triton.jit(do_not_specialize=["first", "rows"], do_not_specialize_on_alignment=["ids_ptr"])
def _embedding(
    ids_ptr, weight_ptr, out_ptr, width, first, rows, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy rows. PART: the table holds `rows` rows from `first` on, and the rest are zeros."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: the step's strict kernel (base/launch.py, rule 4)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    inside = column < width
    held = inside
    if PART:
        row = row - first + column * 0  # for each column, as a mask must be
        held = inside & (row >= 0) & (row < rows)
    x = tl.load(weight_ptr + row * width + column, mask=held, other=0.0)
    tl.store(out_ptr + token * width + column, x, mask=inside)


def embedding(ids_T: Tensor, weight_VM: Tensor) -> Tensor:
    """Compute `op.embedding`. If a gradient is wanted, torch's own kernel runs."""
    if torch.is_grad_enabled() and weight_VM.requires_grad:
        return torch.nn.functional.embedding(ids_T, weight_VM)
    return _launch(ids_T, weight_VM, 0, part=False)


def embedding_part(ids_T: Tensor, weight_VM: Tensor, first: int) -> Tensor:
    """Compute `op.embedding_part`. If a gradient is wanted, plain torch runs."""
    if torch.is_grad_enabled() and weight_VM.requires_grad:
        return op.embedding_part(ids_T, weight_VM, first)
    return _launch(ids_T, weight_VM, first, part=True)


def _launch(ids_T: Tensor, weight_VM: Tensor, first: int, *, part: bool) -> Tensor:
    tokens, width = len(ids_T), weight_VM.shape[1]
    out_TM = torch.empty(tokens, width, dtype=weight_VM.dtype, device=weight_VM.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _embedding[(tokens, triton.cdiv(width, block))](
        ids_T, weight_VM, out_TM, width, first, len(weight_VM), BLOCK=block, PART=part, num_warps=4,
        **launch_options(weight_VM.device),
    )  # fmt: skip
    return out_TM


_TYPES = {
    "ids_ptr": "*i64",
    "weight_ptr": "*bf16",
    "out_ptr": "*bf16",
    "width": "i32:16",
    "first": "i32",
    "rows": "i32",
}

AOT = (
    AotKernel(_embedding, _TYPES, {"BLOCK": BLOCK, "PART": False}, num_warps=4, hot=True),
    AotKernel(_embedding, _TYPES, {"BLOCK": BLOCK, "PART": True}, num_warps=4, hot=True, archs=ONE_OF_EACH),
)
