"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The number for a token is a pure function of (request seed, position, token id). There is no generator state, nothing
depends on what else runs in the batch, and any implementation on any device gives the same bits.

    key = seed (64 bits)   counter = (token id // 4, position, stream, 0)   word = token id % 4

Legend:
    R  rows
    C  tokens of a row whose noise is wanted
    X  groups of four tokens, of a row or of all rows
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
ROUNDS = 10


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit words per counter, as int64 tensors in [0, 2**32). All inputs are int64 of broadcastable
    shapes."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64-bit products; the sign bit is only a bit here
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(seed_R: Tensor, position_R: Tensor, num_columns: int, stream: int = 0, first: int = 0) -> Tensor:
    """Return float32 [R, num_columns] strictly inside (0, 1), with a column for each token id from `first` on. Seeds
    and positions are int64.

    A number is 23 bits plus half a step, which float32 represents exactly. So neither 0 nor 1 can appear.
    """
    before = first % 4
    columns = first // 4 + torch.arange(-(-(before + num_columns) // 4), device=seed_R.device)
    words = torch.stack(_words(seed_R, position_R, columns[None, :], stream), dim=-1).flatten(1)
    return _inside(words[:, before : before + num_columns])


def _words(seed_R: Tensor, position_R: Tensor, group_RX: Tensor, stream: int = 0) -> tuple[Tensor, ...]:
    zero = torch.zeros((), dtype=torch.int64, device=seed_R.device)
    counter = (group_RX, position_R[:, None], zero + stream, zero)
    return philox_4x32(counter, (seed_R[:, None] & _LOW, (seed_R[:, None] >> 32) & _LOW))


def _inside(words: Tensor) -> Tensor:
    return ((words >> 9).float() + 0.5) * 2.0**-23


def gumbel(seed_R: Tensor, position_R: Tensor, num_columns: int, first: int = 0) -> Tensor:
    """Return standard Gumbel noise [R, num_columns] of the tokens from `first` on: argmax(logits + noise) is a sample
    from softmax(logits)."""
    return -torch.log(-torch.log(uniform(seed_R, position_R, num_columns, first=first)))


def gumbel_of(seed_R: Tensor, position_R: Tensor, token_RC: Tensor) -> Tensor:
    """Return the noise of some tokens of each row (int64; that of -1 means nothing): [R, C]."""
    token_RC = token_RC.clamp(min=0)
    words = torch.stack(_words(seed_R, position_R, token_RC // 4), dim=-1)
    word_RC1 = (token_RC % 4)[..., None]
    return -torch.log(-torch.log(_inside(words.gather(-1, word_RC1)[..., 0])))
