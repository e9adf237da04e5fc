"""The choice of kernels for rows that run in chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ridgeline.kernels.scans.gated_delta import triton_prepare

PART = 4096  # tokens: the first part is prepared by itself, and each one more begins and ends once more
LEAST_SEGMENT = 512  # tokens; shorter ones spend their time on the states that they begin and end with
LEAST_MEAN = 256  # tokens a row; with fewer most rows are single tokens, whose programs have nothing to do


class Plan(NamedTuple):
    """The cut of rows that run in chunks.

    columns, warps: the columns of a state that a program of triton_chunks.py has, and its warps.
    stages: the chunks that are in shared memory at once.
    hopper: the kernel is that of hopper_chunks.py, where four warps multiply for 64 columns and eight for 128.
    segment: the tokens of a segment, a multiple of a chunk's; 0: a row is not divided.
    carry_columns: the columns of a program that runs a segment for its effect; 0: as many as the others.
    part: how many tokens are prepared while those in front of them are multiplied, for Hopper without segments;
        0: all are prepared first.
    block, prepare_warps, registers, share: the blocks that triton_prepare.py inverts as a batch, its warps, the limit
        of each thread's registers (0: there is none), and the value heads of a program.
    """

    columns: int
    warps: int
    stages: int
    hopper: bool = False
    segment: int = 0
    carry_columns: int = 0
    part: int = 0
    block: int = triton_prepare.PART
    prepare_warps: int = triton_prepare.WARPS
    registers: int = triton_prepare.REGISTERS
    share: int = 1

    def parts(self, tokens: int) -> int:
        """Return into how many parts so many tokens are divided."""
        return max(1, tokens // self.part) if self.part and self.hopper and not self.segment else 1


class Gpu(NamedTuple):
    """A GPU: its compute capability, its multiprocessors, and the bytes of shared memory that a program may have."""

    capability: tuple[int, int]
    multiprocessors: int
    shared: int


def choose(rows: int, tokens: int, value_heads: int, keys: int, values: int, dtype: torch.dtype, gpu: Gpu) -> Plan:
    """Return the plan for so many rows and tokens, on a GPU.

    On Hopper a row is divided if whole rows leave three of four multiprocessors without work. Where multiprocessors are
    what is short, a program has two warpgroups, and prepares two heads at once; but not where most rows are single
    tokens, as beside a long prompt. Where neither holds, a long row's parts are prepared beside the products of those
    in front. On an H200 (2026-11-24) that is within 4 % of the best plan that
    was tried, for seven kinds of rows of 1,024 to 65,536 tokens and with 8 and 32 value heads.
    """
    capability, multiprocessors, shared = gpu
    stages = 3 if shared > 200_000 else 2 if shared > 140_000 else 1  # a stage of a cut has 56 or 64 KiB
    tiles = -(-values // 64)
    if capability == (9, 0) and keys == 128 and values % 64 == 0 and dtype != torch.float32 and stages == 3:
        programs = rows * value_heads * tiles
        segment = -(-tokens * programs // rows // multiprocessors // 64) * 64 if 4 * programs <= multiprocessors else 0
        worth = segment and tokens >= 4 * max(segment, LEAST_SEGMENT)
        plan = Plan(64, 4, stages, hopper=True)
        wide = 128 if values % 128 == 0 else 64
        if worth:
            return plan._replace(segment=max(segment, LEAST_SEGMENT), carry_columns=wide)
        if programs > multiprocessors:
            return plan._replace(columns=wide, share=2) if tokens >= LEAST_MEAN * rows else plan
        return plan._replace(part=PART if tokens >= 2 * PART else 0)
    if rows * value_heads * tiles <= 2 * multiprocessors or values <= 64 or stages == 1:
        return Plan(min(64, 1 << (max(values, 16) - 1).bit_length()), 4, stages)
    return Plan(128, 8, stages)  # two warpgroups share what they read
