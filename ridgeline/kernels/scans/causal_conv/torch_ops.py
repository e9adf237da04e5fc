"""The convolution in plain torch: all rows lie behind one another, each behind its tail, and are multiplied at once.

Legend: that of op.py, and
    F  the inputs of all rows, tails included
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.causal_conv.op import ConvInputs, activation_of
from ridgeline.kernels.scans.metadata import ScanMetadata


def causal_conv(given: ConvInputs, tails_NwX: Tensor, metadata: ScanMetadata) -> Tensor:
    act, before = activation_of(given.activation), tails_NwX.shape[1]
    x_TX, weight_XW, bias_X = given.x_TX, given.weight_XW, given.bias_X
    device, rows = x_TX.device, metadata.num_rows
    tails_RwX = tails_NwX.index_select(0, metadata.reads_R).masked_fill_(metadata.fresh_R[:, None, None], 0)
    if metadata.tokens_each == 1:
        inputs_RWX = torch.cat((tails_RwX.to(x_TX.dtype), x_TX[:, None]), 1)
        y_TX = torch.einsum("rwx,xw->rx", inputs_RWX.float(), weight_XW.float())
        _store(tails_NwX, metadata.writes_R, inputs_RWX[:, 1:])
        _store(tails_NwX, metadata.marked_R, inputs_RWX[:, 1:])
        return act(y_TX if bias_X is None else y_TX + bias_X.float()).to(x_TX.dtype)
    start_R1 = metadata.start_R1.long()
    token_T, row_R = torch.arange(metadata.num_tokens, device=device), torch.arange(rows, device=device)
    row_T = torch.searchsorted(start_R1, token_T, right=True).clamp_(max=rows) - 1
    tail_Rw = (start_R1[:-1] + row_R * before)[:, None] + torch.arange(before, device=device)
    first_T = token_T + row_T * before  # the oldest input that a token's output is made of
    inputs_FX = x_TX.new_zeros(metadata.num_tokens + rows * before, x_TX.shape[1])
    inputs_FX[tail_Rw] = tails_RwX.to(x_TX.dtype)
    inputs_FX[first_T + before] = x_TX
    wide_FX, weight_WX = inputs_FX.float(), weight_XW.float().T
    sum_FX = wide_FX[: len(wide_FX) - before] * weight_WX[0]
    for i in range(1, before + 1):
        sum_FX.addcmul_(wide_FX[i : len(wide_FX) - before + i], weight_WX[i])
    y_TX = sum_FX[first_T]
    lengths_R1 = start_R1.diff()[:, None]
    _store(tails_NwX, torch.where(lengths_R1[:, 0] > 0, metadata.writes_R, 0), inputs_FX[tail_Rw + lengths_R1])
    _store(tails_NwX, metadata.marked_R, inputs_FX[tail_Rw + metadata.marks_R[:, None]])
    return act(y_TX if bias_X is None else y_TX + bias_X.float()).to(x_TX.dtype)


def _store(tails_NwX: Tensor, blocks_R: Tensor, tails_RwX: Tensor) -> None:
    tails_NwX.index_copy_(0, blocks_R, tails_RwX.to(tails_NwX.dtype))
