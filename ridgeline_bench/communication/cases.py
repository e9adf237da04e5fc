"""The collectives that are measured, and what each must give: whole numbers so small that every sum of them is exact.

Legend:
    N  numbers of a message
"""

from __future__ import annotations

import torch
from torch import Tensor

PERIOD = 4099  # a prime, so that no part of a message looks like another
LARGEST = 8  # of a number; sums over 31 ranks are exact in bfloat16, which holds whole numbers up to 256
WIDTH = 4096  # of a row that is normalized
EPS = 1e-5
NORM_ERROR = 2.0**-6  # relative; a result in bfloat16 is rounded by up to 2^-9, and its factors as well
OPS = {
    "all_reduce": "the sum of all ranks' tensors",
    "all_reduce_norm": "that sum, and its rms_norm",
    "all_gather": "all ranks' tensors",
    "reduce_scatter": "a part of the sum",
    "all_to_all": "a part of every rank's tensor",
    "exchange": "a part of every rank's tensor, and its own parts back: two all_to_all, as tokens go to experts",
    "send": "a message to the next rank, and one from the rank before (put, get: through peer memory)",
    "copy": "a copy from one GPU to another, over NVLink or through the host",
}


def numbers(op: str, nbytes: int, ranks: int, dtype: torch.dtype) -> int:
    """Return the count of numbers in a message of about `nbytes`: whole rows, where rows are normalized or exchanged,
    else a multiple of eight for each rank's part, the same for all."""
    rows = {"all_reduce_norm": WIDTH, "exchange": WIDTH * ranks}.get(op, 0)
    unit = rows if rows and nbytes > rows * dtype.itemsize else 8 * ranks
    return max(1, round(nbytes / dtype.itemsize / unit)) * unit


def content(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a rank's own numbers: [N]."""
    index_P = torch.arange(min(count, PERIOD), device=device)
    period_P = ((index_P * 7 + index_P // 17 + rank * 13) % (2 * LARGEST + 1) - LARGEST).to(dtype)
    return period_P.repeat(-(-count // PERIOD))[:count]


def expected(op: str, rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers that a rank must receive: [N]. count: the numbers of the message, as `perf.links` counts its
    bytes."""
    part = count // ranks
    if op in ("all_reduce", "all_reduce_norm", "reduce_scatter"):
        total_N = content(0, count, dtype, device)
        for other in range(1, ranks):
            total_N += content(other, count, dtype, device)
        return total_N[rank * part : (rank + 1) * part] if op == "reduce_scatter" else total_N
    if op == "all_gather":
        return torch.cat([content(other, part, dtype, device) for other in range(ranks)])
    if op == "all_to_all":
        mine = slice(rank * part, (rank + 1) * part)
        return torch.cat([content(other, count, dtype, device)[mine] for other in range(ranks)])
    if op == "exchange":
        there_N = expected("all_to_all", rank, ranks, count, dtype, device)
        return torch.cat([there_N, content(rank, count, dtype, device)])
    return content((rank - 1) % ranks if op == "send" else 0, count, dtype, device)


def brought(op: str, rank: int, ranks: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a rank's input to the op, from which `expected` follows."""
    if op == "copy":
        return content(0, count, dtype, device)
    return content(rank, count // ranks if op == "all_gather" else count, dtype, device)


def difference(op: str, got_N: Tensor, want_N: Tensor) -> str | None:
    """Return in words how a result differs from what it must be, or None."""
    if got_N.numel() != want_N.numel():
        return f"has {got_N.numel()} numbers instead of {want_N.numel()}"
    got_N = got_N.view(-1)
    if op != "all_reduce_norm":
        wrong = int((got_N != want_N).sum())
        return f"{wrong} of {len(want_N)} numbers are wrong" if wrong else None
    rows_TM = want_N.double().view(-1, min(WIDTH, len(want_N)))
    normed_TM = rows_TM * torch.rsqrt(rows_TM.square().mean(-1, keepdim=True) + EPS)
    error = float((got_N.double() - normed_TM.view(-1)).abs().max() / normed_TM.abs().max())
    return None if error < NORM_ERROR else f"a relative error of {error:.2g}"
