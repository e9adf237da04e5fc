"""Attention over expanded latents for Hopper: which calls it takes, and the launch. hopper_kernel.py is the device's
part. The legend is that of op.py, and

    I  tiles of queries
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.attention.expanded.hopper_kernel import expanded_hopper_kernel
from ridgeline.kernels.attention.expanded.op import LongRows
from ridgeline.kernels.attention.packed.triton import tiles_of
from ridgeline.kernels.attention.paged.triton_common import LOG2E
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.hopper.ring import panel_layout

KEY, ROPE, VALUE = 128, 64, 128  # the only widths
QUERIES, KEYS, STAGES = 128, 128, 2
CACHED_BYTES = 24 << 20  # of keys and values that are worked on together: about half of the second-level cache


class KernelPace(NamedTuple):
    """The µs of a kernel on one multiprocessor: to begin and end a program, and for QUERIES queries and KEYS
    keys of a head."""

    program: float
    tile: float


# Fitted to six shapes on an H200, and within 13 % of long ones in graphs (docs/latent-attention.md)
HOPPER, TRITON = KernelPace(4.0, 1.9), KernelPace(8.0, 2.97)
HOST = 50.0  # µs that the host takes longer to launch this kernel, measured there: it makes descriptors


def worth(rows: LongRows, heads: int, device: torch.device) -> bool:
    """Return True if this kernel saves the device more time than its launch takes of the host's in addition. So it is
    never slower than the one in Triton, whether the device waits for the host or not."""
    key = "hopper", heads
    if key not in rows.derived:
        steps_I, programs = steps_of(rows.tokens_R, rows.bound_R), num_multiprocessors(device)
        saved = estimate(TRITON, steps_I, heads, programs) - estimate(HOPPER, steps_I, heads, programs)
        rows.derived[key] = saved > HOST
    found: bool = rows.derived[key]
    return found


def steps_of(tokens_R: np.ndarray, bound_R: np.ndarray) -> np.ndarray:
    """Return the tiles of keys that each tile of queries sees: [I]."""
    row_I, begun_I = tiles_of(tokens_R, QUERIES)
    seen_I = (bound_R - tokens_R)[row_I] + np.minimum(begun_I + QUERIES, tokens_R[row_I])
    found: np.ndarray = -(-seen_I // KEYS)
    return found


def estimate(pace: KernelPace, steps_I: np.ndarray, heads: int, multiprocessors: int) -> float:
    """Return the µs of all heads' tiles of so many steps: those of the longest, or of all where multiprocessors have
    several."""
    each_I = pace.program + pace.tile * steps_I
    return float(max(each_I.max(initial=0), heads * each_I.sum() / multiprocessors))


def supports(q_THK: Tensor, q_THY: Tensor, k_JHK: Tensor, v_JHV: Tensor, r_JY: Tensor) -> bool:
    """Return True if a Hopper GPU can run `attend`: in 16 bits, with DeepSeek's widths, and where bulk copies can read:
    rows and heads begin at multiples of 16 bytes."""
    tensors = (q_THK, q_THY, k_JHK, v_JHV, r_JY)
    return (
        q_THK.dtype in (torch.bfloat16, torch.float16)
        and all(x.dtype == q_THK.dtype for x in tensors)
        and (q_THK.shape[2], q_THY.shape[2], v_JHV.shape[2]) == (KEY, ROPE, VALUE)
        and all(x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:-1]) for x in tensors)
    )


def attend(
    out_THV: Tensor, queries: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor, Tensor], rows: LongRows,
    tiles_I4: Tensor, scale: float,
) -> None:  # fmt: skip
    """Compute `op.expanded_attention`.

    queries: q_THK and q_THY. cached: k_JHK, v_JHV and r_JY. tiles_I4: as `triton._tiles` makes them, of QUERIES.
    """
    (q_THK, q_THY), (k_JHK, v_JHV, r_JY) = queries, cached
    heads, tiles = q_THK.shape[1], len(tiles_I4)
    longest = int(rows.bound_R.max(initial=1))
    at_once = max(1, min(heads, CACHED_BYTES // (2 * (KEY + VALUE) * longest)))
    expanded_hopper_kernel[(tiles * heads,)](
        _descriptor(q_THK, QUERIES // 2), _descriptor(q_THY, QUERIES // 2), _descriptor(k_JHK, KEYS),
        _descriptor(r_JY[:, None], KEYS), _descriptor(v_JHV, KEYS), out_THV, tiles_I4, rows.kv_len_R, tiles, heads,
        at_once, scale * LOG2E.value, *out_THV.stride()[:2], q_THK.stride(1), q_THY.stride(1), k_JHK.stride(1),
        KEYS=KEYS, STAGES=STAGES, num_warps=4, **launch_options(q_THK.device),
    )  # fmt: skip


def _descriptor(x_THX: Tensor, rows: int) -> TensorDescriptor:
    """Return the descriptor by which boxes of some rows of one head are copied. A head's numbers are columns of a
    matrix."""
    tokens, heads, width = x_THX.shape
    columns = (heads - 1) * x_THX.stride(1) + width
    return TensorDescriptor(x_THX, [tokens, columns], [x_THX.stride(0), 1], [rows, width], panel_layout(16))


def _aot() -> AotKernel:
    layout = panel_layout(16)
    boxes = {"q": (QUERIES // 2, KEY), "rotated": (QUERIES // 2, ROPE)}
    boxes |= {"k": (KEYS, KEY), "r": (KEYS, ROPE), "v": (KEYS, VALUE)}
    kinds = {f"{name}_desc": f"tensordesc<bf16[{rows}, {width}],{layout!r}>" for name, (rows, width) in boxes.items()}
    kinds |= {"out_ptr": "*bf16", "tiles_ptr": "*i32", "kv_len_ptr": "*i32", "scale": "fp32"}
    kinds |= dict.fromkeys(("stride_out", "head_out", "head_q", "head_rotated", "head_kv"), "i32:16")
    constants = {"KEYS": KEYS, "STAGES": STAGES}
    names = [name for name in expanded_hopper_kernel.arg_names if name not in constants and name != "PDL"]
    signature = {name: kinds.get(name, "i32") for name in names}
    # Not hot: Triton 3.6 keeps all in registers, and Triton 3.9 16 bytes of a thread in memory.
    return AotKernel(
        expanded_hopper_kernel, signature, constants, num_warps=4, num_stages=1, archs=("sm_90",), tensor_cores="HGMMA",
    )  # fmt: skip


AOT = (_aot(),)
