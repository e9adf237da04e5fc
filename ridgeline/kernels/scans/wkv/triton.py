"""RWKV's weighted mean on a GPU: short rows by one kernel, longer ones by three.

Of a long row all chunks run side by side, twice. First each sums up its own tokens. A kernel over chunks makes of these
sums the states before each, and then each chunk runs again with the state that it begins with.

Legend: that of triton_tokens.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.wkv.op import NOTHING, WkvInputs
from ridgeline.kernels.scans.wkv.triton_tokens import CHANNELS, WARPS, _wkv_carry, _wkv_chunks, _wkv_rows

CHUNK = 32
SHORT = 32  # rows of so many tokens run as a whole


def wkv(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata) -> Tensor:
    o_TX = torch.empty(given.v_TX.shape, dtype=given.v_TX.dtype, device=given.v_TX.device)
    if metadata.tokens_each <= SHORT:
        _rows(given, states_N3X, metadata, o_TX, SHORT)
    if metadata.tokens_each == 0 or metadata.tokens_each > SHORT:
        _long(given, states_N3X, metadata, o_TX)
    return o_TX


def wkv_in_order(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    o_TX = torch.empty(given.v_TX.shape, dtype=given.v_TX.dtype, device=given.v_TX.device)
    _rows(given, states_N3X, metadata, o_TX, 0)
    return o_TX


def _rows(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata, o_TX: Tensor, longest: int) -> None:
    k_TX, v_TX, channels = given.k_TX, given.v_TX, given.k_TX.shape[1]
    _wkv_rows[(triton.cdiv(channels, CHANNELS), metadata.num_rows)](
        k_TX, v_TX, given.decay_X, given.bonus_X, states_N3X, o_TX, *metadata.of_rows, k_TX.stride(0), v_TX.stride(0),
        states_N3X.stride(0), NOTHING, X=channels, BX=CHANNELS, LONGEST=longest,
        num_warps=WARPS, **launch_options(k_TX.device),
    )  # fmt: skip


def _long(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata, o_TX: Tensor) -> None:
    k_TX, v_TX, channels, chunks = given.k_TX, given.v_TX, given.k_TX.shape[1], metadata.chunks(CHUNK)
    number = len(chunks.first_C)
    of_chunks_C3X = torch.empty((number, 3, channels), dtype=torch.float32, device=k_TX.device)
    shape = {"X": channels, "BX": CHANNELS, "LONGEST": SHORT, "num_warps": WARPS, **launch_options(k_TX.device)}
    tiles = triton.cdiv(channels, CHANNELS)
    for says in (False, True):
        _wkv_chunks[(tiles, number)](
            k_TX, v_TX, given.decay_X, given.bonus_X, of_chunks_C3X, o_TX, metadata.start_R1, *chunks.of_chunks,
            k_TX.stride(0), v_TX.stride(0), NOTHING, SAYS=says, **shape,
        )  # fmt: skip
        if not says:
            _wkv_carry[(tiles, metadata.num_rows)](
                of_chunks_C3X, given.decay_X, states_N3X, *metadata.of_rows, chunks.length_C, chunks.of_R1,
                states_N3X.stride(0), NOTHING, **shape,
            )  # fmt: skip
