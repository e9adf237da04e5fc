"""Latent attention for Hopper: which steps it takes, and the launch. hopper_kernel.py is the device's part."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.attention.latent.hopper_kernel import latent_hopper_kernel
from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.attention.paged.triton_common import LOG2E
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options

KEYS, PRODUCER_REGS = 128, 40
TILES = False  # tiles of long rows too: these were compiled and have not run on a GPU yet
FEWEST = 33  # queries of an item or a tile: of fewer, half of a program's products would be padding


def supports(queries: int, q_THL: Tensor, q_THY: Tensor, cache_NPW: Tensor, *, items: bool) -> bool:
    """Return True if a Hopper GPU should attend here with items, or tiles, of so many queries: in 16 bits, with latents
    of 512 numbers and rotated parts of 64, and blocks of 8, 16, … tokens. A cache on the meta device stands for one
    that begins where bulk copies can read."""
    block, token, _ = cache_NPW.stride()
    size = cache_NPW.shape[1]
    return (
        (items or TILES)
        and queries >= FEWEST
        and (q_THL.shape[2], q_THY.shape[2]) == (512, 64)
        and cache_NPW.dtype in (torch.bfloat16, torch.float16)
        and q_THL.dtype == q_THY.dtype == cache_NPW.dtype
        and size >= 8
        and size & (size - 1) == 0
        and token % 8 == 0  # of what bulk copies read, rows begin at multiples of 16 bytes
        and block % token == 0
        and cache_NPW.data_ptr() % 16 == 0
    )


def attend(
    tokens: int, work: tuple[Tensor, ...], tensors: tuple[Tensor, ...], batch: RaggedBatch, scale: float
) -> None:
    """Attend with items or tiles of up to so many tokens; the arguments are those of `triton._launch`."""
    q_THL, q_THY, cache_NPW, out_THL = tensors
    heads, size = q_THL.shape[1], cache_NPW.shape[1]
    block, token, _ = cache_NPW.stride()
    lines = (len(cache_NPW) - 1) * (block // token) + size
    box = min(size, KEYS // 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    desc = TensorDescriptor(cache_NPW, [lines, cache_NPW.shape[2]], [token, 1], [box, 64], layout)
    latent_hopper_kernel[(len(work[0]) * triton.cdiv(tokens * heads, 64),)](
        desc,
        q_THL,
        q_THY,
        out_THL,
        batch.block_table_SC,
        *work,
        scale * LOG2E.value,
        *q_THL.stride()[:2],
        *q_THY.stride()[:2],
        block // token,
        batch.block_table_SC.stride(0),
        lines,
        HEADS=heads,
        TOKENS=tokens,
        P=size,
        BOX=box,
        KEYS=KEYS,
        ITEMS=work[0].shape[1] == 8,
        PRODUCER_REGS=PRODUCER_REGS,
        num_warps=8,
        **launch_options(q_THL.device),
    )


def _aot(heads: int, tokens: int, block_size: int) -> AotKernel:
    box = min(block_size, KEYS // 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kinds = {"table_ptr": "*i32", "work_ptr": "*i32", "counts_ptr": "*i32", "whose_ptr": "*i32"}
    kinds |= {"parts_ptr": "*fp32", "part_lse_ptr": "*fp32", "scale": "fp32"}
    kinds |= {"desc": f"tensordesc<bf16[{box}, 64],{layout!r}>"}
    kinds |= {f"stride_{name}": "i32:16" for name in ("q_token", "q_head", "rotated_token", "rotated_head")}
    constants = {
        "HEADS": heads, "TOKENS": tokens, "P": block_size, "BOX": box, "KEYS": KEYS, "ITEMS": True,
        "PRODUCER_REGS": PRODUCER_REGS,
    }  # fmt: skip
    names = [name for name in latent_hopper_kernel.arg_names if name not in constants and name != "PDL"]
    signature = {name: kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    # Not hot: Triton 3.6 keeps all in registers, and Triton 3.9 80 bytes of a thread in memory.
    return AotKernel(
        latent_hopper_kernel, signature, constants, num_warps=8, num_stages=1, archs=("sm_90",), tensor_cores="HGMMA",
    )  # fmt: skip


AOT = (_aot(128, 1, 64),)
