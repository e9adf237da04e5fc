"""Linear attention on a GPU with gradients: kernels that take all chunks side by side, forward and backward.

The backward pass computes the states before the chunks again. For a head of K by V they are 2 K V / 64 bytes a token in
16 bits: 4,096 for 256 by 512, where the token's q, k, v and decays are 3,072. Kept from the forward pass they would
stay for every layer at once. Made again they are there for one layer at a time, for the bytes of k, v and the states
once more; docs/recurrent-math.md counts them.

Yang, Wang, Shen, Panda and Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training",
arXiv 2312.06635.

Legend: that of triton_chunked.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ridgeline.kernels.scans.linear_attention.op import LinearInputs, by_channel
from ridgeline.kernels.scans.linear_attention.triton_chunked import (
    CHUNK,
    NARROW,
    PART,
    WIDE,
    _linear_attention_fade,
    _linear_attention_outputs,
    _linear_attention_states,
    _linear_attention_within,
)
from ridgeline.kernels.scans.linear_attention.triton_gradients import (
    _linear_attention_d_within,
    _linear_attention_dk,
    _linear_attention_dv,
)
from ridgeline.kernels.scans.linear_attention.triton_step import Rule
from ridgeline.kernels.scans.metadata import Chunks, ScanMetadata

STAGES = 3  # chunks that a walk asks for at once


@torch.compiler.disable  # a break in the graph: what is compiled ends here, and goes on behind it
def linear_attention(given: LinearInputs, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Compute the op, with gradients of all inputs but the states."""
    o_THV, _ = _Chunked.apply(*_differentiated(given), None, states_NHKV, _Fixed(metadata, given.scale))
    return o_THV


def linear_attention_from(given: LinearInputs, initial_RHKV: Tensor, metadata: ScanMetadata) -> tuple[Tensor, Tensor]:
    """Return (o_THV, the states after the rows, float32 [R, H, K, V]), both with gradients, those of the initial states
    included. Of `metadata` only the rows' tokens count."""
    every = torch.arange(metadata.num_rows, device=given.v_THV.device)
    own = replace(
        metadata, reads_R=every, writes_R=every, fresh_R=torch.zeros_like(metadata.fresh_R),
        marks_R=torch.zeros_like(metadata.marks_R), _chunks={},
    )  # fmt: skip
    final_RHKV = initial_RHKV.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    fixed = _Fixed(own, given.scale)
    o_THV, final_RHKV = _Chunked.apply(*_differentiated(given), initial_RHKV.float(), final_RHKV, fixed)
    return o_THV, final_RHKV


def _differentiated(given: LinearInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the decays [T, H, K]."""
    dtype, k_THK = given.v_THV.dtype, given.k_THK
    return given.q_THK.to(dtype), k_THK.to(dtype), given.v_THV, by_channel(given.decay, k_THK)


class _Fixed(NamedTuple):
    """Arguments that have no gradient."""

    metadata: ScanMetadata
    scale: float


class _Faded(NamedTuple):
    """A chunk's numbers before its state is known."""

    asked_THK: Tensor
    told_THK: Tensor
    leaves_CHK: Tensor
    within_CHLL: Tensor


class _Chunked(torch.autograd.Function):
    """The chunked form as torch sees it. The rows' states are replaced. initial_RHKV: the states that the rows begin
    with, if those have gradients, and then the states after the rows come out, too; None: they have none."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        decay_THK: Tensor,
        initial_RHKV: Tensor | None,
        states_NHKV: Tensor,
        fixed: _Fixed,
    ) -> tuple[Tensor, Tensor | None]:
        metadata, scale = fixed
        rule = Rule(q_THK, k_THK, v_THV, decay_THK, scale)
        if any(ctx.needs_input_grad):
            begun_RHKV = states_NHKV[metadata.reads_R] if initial_RHKV is None else initial_RHKV
            ctx.save_for_backward(q_THK, k_THK, v_THV, decay_THK, begun_RHKV)
        ctx.rows, ctx.scale = metadata, scale
        ctx.set_materialize_grads(False)
        chunks = metadata.chunks(CHUNK)
        faded = _faded(rule, chunks)
        before_CHKV = _states_like(rule, chunks)
        _walk(rule, faded, before_CHKV, states_NHKV, metadata, chunks)
        o_THV = _room(v_THV, v_THV.dtype, metadata)
        heads, keys, values = before_CHKV.shape[1:]
        _linear_attention_outputs[(triton.cdiv(values, WIDE), heads, len(before_CHKV))](
            faded.asked_THK, v_THV, faded.within_CHLL, before_CHKV, o_THV, chunks.first_C, chunks.length_C,
            v_THV.stride(0), H=heads, K=keys, V=values, BK=WIDE, BV=WIDE, L=CHUNK,
        )  # fmt: skip
        return o_THV, None if initial_RHKV is None else states_NHKV[metadata.writes_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q_THK, k_THK, v_THV, decay_THK, begun_RHKV = ctx.saved_tensors
        do_THV, d_final_RHKV = gradients
        do_THV = torch.zeros_like(v_THV) if do_THV is None else do_THV
        rule = Rule(q_THK, k_THK, v_THV, decay_THK, ctx.scale)
        of_decays, of_initial = ctx.needs_input_grad[3:5]
        *found, d_initial_RHKV = _gradients(
            rule, do_THV.contiguous(), begun_RHKV, d_final_RHKV, ctx.rows, bool(of_decays)
        )
        return *found, d_initial_RHKV if of_initial else None, None, None


def _faded(rule: Rule, chunks: Chunks) -> _Faded:
    q_THK, k_THK, of_rows = rule.q_THK, rule.k_THK, rule.strides
    (heads, keys), number, device = k_THK.shape[1:], len(chunks.first_C), k_THK.device
    asked_THK, told_THK = (torch.empty(k_THK.shape, dtype=k_THK.dtype, device=device) for _ in range(2))
    leaves_CHK = torch.empty((number, heads, keys), dtype=torch.float32, device=device)
    within_CHLL = torch.empty((number, heads, CHUNK, CHUNK), dtype=k_THK.dtype, device=device)
    strides, each = (of_rows[0], of_rows[1], of_rows[3], of_rows[4]), bool(rule.fade_THK.stride(2))
    _linear_attention_fade[(triton.cdiv(keys, WIDE), heads, number)](
        q_THK, k_THK, rule.fade_THK, asked_THK, told_THK, leaves_CHK, chunks.first_C, chunks.length_C, *strides,
        rule.scale, H=heads, K=keys, BK=WIDE, L=CHUNK, EACH=each,
    )  # fmt: skip
    _linear_attention_within[(CHUNK // PART, heads, number)](
        q_THK, k_THK, rule.fade_THK, within_CHLL, chunks.first_C, chunks.length_C, *strides,
        rule.scale, H=heads, K=keys, BK=NARROW, L=CHUNK, PART=PART, EACH=each,
    )  # fmt: skip
    return _Faded(asked_THK, told_THK, leaves_CHK, within_CHLL)


def _room(like: Tensor, dtype: torch.dtype, metadata: ScanMetadata) -> Tensor:
    """Return memory for a result of this shape. Tokens behind the rows, if there can be any, are zeros."""
    padded = metadata.tokens_each * metadata.num_rows != metadata.num_tokens
    return (torch.zeros if padded else torch.empty)(like.shape, dtype=dtype, device=like.device)


def _states_like(rule: Rule, chunks: Chunks) -> Tensor:
    """Return memory for a state of every chunk."""
    shape = len(chunks.first_C), *rule.k_THK.shape[1:], rule.v_THV.shape[2]
    return torch.empty(shape, dtype=rule.k_THK.dtype, device=rule.k_THK.device)


class _Back(NamedTuple):
    """The gradients of a walk back: those of the outputs and of the states behind the rows, and room for those of the
    states after the chunks and before the rows."""

    do_THV: Tensor
    after_CHKV: Tensor
    d_final_RHKV: Tensor | None
    d_initial_RHKV: Tensor


def _walk(
    rule: Rule,
    faded: _Faded,
    before_CHKV: Tensor,
    states_NHKV: Tensor,
    metadata: ScanMetadata,
    chunks: Chunks,
    back: _Back | None = None,
) -> None:
    """Fill in the states before the chunks. With `back` also fill in the gradients of the states after the chunks and
    before the rows, and leave the rows' states as they are."""
    heads, keys, values = before_CHKV.shape[1:]
    rows, (do_THV, *gradients) = metadata.num_rows, back or (None,) * 4
    tiles = triton.cdiv(keys, WIDE) * triton.cdiv(values, WIDE)
    _linear_attention_states[(tiles, heads, rows * (2 if back else 1))](
        faded.told_THK, rule.v_THV, faded.leaves_CHK, before_CHKV, states_NHKV,
        faded.asked_THK if back else None, do_THV, *gradients,
        *metadata.of_rows,
        chunks.of_R1, rule.v_THV.stride(0), 0 if do_THV is None else do_THV.stride(0), states_NHKV.stride(0), rows,
        H=heads, K=keys, V=values, BK=WIDE, BV=WIDE, L=CHUNK, STAGES=STAGES, BACK=back is not None,
    )  # fmt: skip


def _gradients(
    rule: Rule,
    do_THV: Tensor,
    initial_RHKV: Tensor,
    d_final_RHKV: Tensor | None,
    metadata: ScanMetadata,
    of_decays: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, the decays and the initial states."""
    q_THK, k_THK, v_THV = rule.q_THK, rule.k_THK, rule.v_THV
    chunks, device = metadata.chunks(CHUNK, at_marks=False), k_THK.device
    faded = _faded(rule, chunks)
    before_CHKV, after_CHKV = (_states_like(rule, chunks) for _ in range(2))
    (number, heads, keys, values), (of_q, of_k, of_v, *of_fade, _) = before_CHKV.shape, rule.strides
    d_initial_RHKV = torch.empty(initial_RHKV.shape, dtype=torch.float32, device=device)
    d_final_RHKV = None if d_final_RHKV is None else d_final_RHKV.contiguous()
    own = replace(metadata, reads_R=torch.arange(metadata.num_rows, device=device))
    back = _Back(do_THV, after_CHKV, d_final_RHKV, d_initial_RHKV)
    _walk(rule, faded, before_CHKV, initial_RHKV, own, chunks, back)
    shape = {"H": heads, "K": keys, "L": CHUNK}
    wide = shape | {"V": values, "BK": WIDE, "BV": WIDE}
    dv_THV = _room(v_THV, v_THV.dtype, metadata)
    d_within_CHLL = torch.empty((number, heads, CHUNK, CHUNK), dtype=torch.float32, device=device)
    _linear_attention_dv[(heads, number)](
        faded.told_THK, v_THV, do_THV, faded.within_CHLL, after_CHKV, dv_THV, d_within_CHLL,
        chunks.first_C, chunks.length_C, of_v, do_THV.stride(0), rule.scale, **wide,
    )  # fmt: skip
    each = bool(rule.fade_THK.stride(2))
    dq_within_THK, dk_within_THK = (torch.empty(k_THK.shape, dtype=torch.float32, device=device) for _ in range(2))
    _linear_attention_d_within[(CHUNK // PART * triton.cdiv(keys, NARROW), heads, number)](
        q_THK, k_THK, rule.fade_THK, d_within_CHLL, dq_within_THK, dk_within_THK, chunks.first_C, chunks.length_C,
        of_q, of_k, *of_fade, **shape, BK=NARROW, PART=PART, EACH=each,
    )  # fmt: skip
    dq_THK, dk_THK = (_room(k_THK, k_THK.dtype, metadata) for _ in range(2))
    d_fade_THK = _room(k_THK, torch.float32, metadata) if of_decays else None
    _linear_attention_dk[(triton.cdiv(keys, WIDE), heads, number)](
        q_THK, k_THK, v_THV, rule.fade_THK, do_THV, before_CHKV, after_CHKV, dq_within_THK, dk_within_THK,
        dq_THK, dk_THK, d_fade_THK, chunks.first_C, chunks.length_C,
        of_q, of_k, of_v, do_THV.stride(0), *of_fade, rule.scale, **wide, EACH=each, num_warps=8,
    )  # fmt: skip
    d_decay_THK = None if d_fade_THK is None else d_fade_THK.to(rule.fade_THK.dtype)
    return dq_THK, dk_THK, dv_THV, d_decay_THK, d_initial_RHKV
