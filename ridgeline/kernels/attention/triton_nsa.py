"""Native sparse attention: compressed keys, a few selected blocks and a window, weighted by gates.

Each query has three answers (Yuan et al., "Native Sparse Attention", 2025), each from keys and values of its own:

    compressed   one key for 32 tokens, every 16 tokens: a weighted mean, with weights that are learned by place
    selected     the blocks of 64 tokens whose compressed keys got most weight, the first and the last two always; one
                 choice for all heads of a group
    window       the last 512 tokens

Of 65,536 tokens, the last query reads 4,096 compressed keys, 1,024 selected ones and 512 of the window. All queries
together read 9.2 times fewer than in dense attention, which is the limit of the gain where rates are equal.

    compress     two passes of a weighted mean: torch
    compressed   `attend_intervals` of triton_sdpa.py, whose logarithms the next step needs
    importance   the weights again, summed over the heads of a group and over what a block shares with the compressed
                 keys. A tile of queries walks over chunks of keys, and heads are a loop
    selection    in the same kernel: the best blocks so far are a list in registers, and better ones of a chunk take the
                 places of the least. Neither scores nor importance go to memory
    selected     one program a query and group: the group's heads are the rows of its tile, as all read the same blocks
    window       `attend_intervals`

The answers are added with the gates of each query and head.

    backward     as if the choice of blocks were given. The compressed branch and the window have triton_sdpa.py's
                 gradients. Of the selected branch a query sums over its blocks, and a block over the list of queries of
                 a group that chose it (triton_gathered.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_gathered import gathered_gradients
from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    NOTHING,
    KeyMasks,
    Tiles,
    WholeAttention,
    add_tile,
    ahead_of_time,
    load_rows,
    output_products,
    strides_of,
)

NO_BLOCK = tl.constexpr(-(1 << 62))  # less than every number of a block and of a place that none has taken


@dataclass(frozen=True)
class Nsa:
    """length, stride: tokens of a compressed key, and from one to the next. block: tokens of a selected block.
    selected: how many blocks a query reads, the first `first` and the last `last` among them. window: its last tokens.

    Raises ValueError unless length is twice the stride and a block a whole number of strides, both powers of 2.
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    selected: int = 16
    first: int = 1
    last: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        per_block = self.block // max(1, self.stride)
        if self.length != 2 * self.stride or self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"length is twice the stride and a block 16, 32, 64, … tokens, got {self}.")
        if per_block * self.stride != self.block or per_block & (per_block - 1):
            raise ValueError(f"a block of {self.block} is no power of 2 times the stride of {self.stride}.")
        if self.selected < self.first + self.last or self.last < 1 or self.window < 1:
            raise ValueError(f"{self.first} first and {self.last} last blocks (at least 1) are selected, got {self}.")

    @property
    def per_block(self) -> int:
        """Strides of a selected block."""
        return self.block // self.stride


class KeysValues(NamedTuple):
    """Keys and values of one branch, [B, G, T, D] each."""

    k: torch.Tensor
    v: torch.Tensor


def compress(x_BGTD: torch.Tensor, weights_LD: torch.Tensor, nsa: Nsa = Nsa()) -> torch.Tensor:
    """Return the weighted means of every `length` tokens, `stride` apart: [B, G, compressed, D].

    weights_LD: by place and channel, in the caller's hands (a uniform 1 / length is the mean).
    """
    windows = x_BGTD.unfold(2, nsa.length, nsa.stride)  # [B, G, compressed, D, length]
    return torch.einsum("bgndl,ld->bgnd", windows, weights_LD.to(x_BGTD.dtype)).contiguous()


def compressed_intervals(tokens: int, nsa: Nsa, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the compressed keys that each query sees, as `KeyMasks.intervals` does: all their tokens are there."""
    at_T = torch.arange(tokens, device=device)
    behind_T = ((at_T + 1 - nsa.length) // nsa.stride + 1).clamp(min=0)
    return torch.zeros_like(behind_T).int(), behind_T.int()


def shares(compressed: int, blocks: int, nsa: Nsa, device: torch.device) -> torch.Tensor:
    """Return the number of strides that each compressed key shares with each block: float32, [compressed, blocks]."""
    begin, low = torch.arange(compressed, device=device)[:, None], torch.arange(blocks, device=device) * nsa.per_block
    shared = torch.minimum(begin + 2, low + nsa.per_block) - torch.maximum(begin, low)
    return shared.clamp(min=0).float()


def select(importance_BGTM: torch.Tensor, nsa: Nsa) -> torch.Tensor:
    """Return the blocks that each query reads, [B, G, T, selected], int32; -1 where there are no more.

    The first and the last ones come in front of all others, and blocks behind the query's own never. Then the most
    important come first, and of equal ones the earlier block.
    """
    tokens, blocks = importance_BGTM.shape[2:]
    own_T = torch.arange(tokens, device=importance_BGTM.device)[:, None] // nsa.block
    at_M = torch.arange(blocks, device=own_T.device)
    always_TM = (at_M < nsa.first) | (at_M > own_T - nsa.last)
    ranked = importance_BGTM.masked_fill(always_TM, float("inf")).masked_fill(at_M > own_T, float("-inf"))
    values, indices = ranked.sort(dim=-1, descending=True, stable=True)
    return indices.masked_fill(values == float("-inf"), -1)[..., : nsa.selected].int()


def nsa_reference(
    q_BHTD: torch.Tensor,
    compressed: KeysValues,
    selected: KeysValues,
    window: KeysValues,
    gates_BHT3: torch.Tensor,
    nsa: Nsa = Nsa(),
) -> torch.Tensor:
    """Return the result of `nsa_attention` from its definition: all scores at once, in the inputs' dtype."""
    tokens, heads, groups = q_BHTD.shape[2], q_BHTD.shape[1], selected.k.shape[1]
    at_T = torch.arange(tokens, device=q_BHTD.device)

    def attend(branch: KeysValues, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in branch)
        scores = (q_BHTD @ k.mT * q_BHTD.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        weights = torch.where(seen, torch.softmax(scores, -1), 0.0)
        return weights @ v, weights

    _, behind_T = compressed_intervals(tokens, nsa, q_BHTD.device)
    count, blocks = compressed.k.shape[2], -(-tokens // nsa.block)
    coarse, weights = attend(compressed, torch.arange(count, device=at_T.device) < behind_T[:, None])
    importance = weights.unflatten(1, (groups, -1)).sum(2) @ shares(count, blocks, nsa, at_T.device).to(weights)
    chosen = select(importance, nsa).long()
    seen = torch.zeros((*importance.shape[:3], blocks + 1), dtype=torch.bool, device=at_T.device)
    seen = seen.scatter(-1, chosen.where(chosen >= 0, blocks), True)[..., :blocks]
    seen = seen.repeat_interleave(nsa.block, -1)[..., :tokens].tril().repeat_interleave(heads // groups, 1)
    near = (at_T <= at_T[:, None]) & (at_T > at_T[:, None] - nsa.window)
    answers = coarse, attend(selected, seen)[0], attend(window, near)[0]
    return (torch.stack(answers, -1) * gates_BHT3[..., None, :]).sum(-1)


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _importance_of(
    q_ptr, k_ptr, log_ptr, q_head, q_row, k_row, queries, begin, per_group, T, N, scale,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the importance of a chunk of blocks, from block begin on, to a tile of queries of one group, [ROWS,
    BLOCKS], float32. q_ptr, k_ptr, log_ptr: of the group's first head, its keys, and that head's logarithms.

    A block shares two strides with each of its compressed keys but the last, and one with that and with the key that
    begins one stride before the block.
    """
    channels, blocks = tl.arange(0, WIDTH), begin + tl.arange(0, BLOCKS)
    keys = begin * PER_BLOCK + tl.arange(0, BLOCKS * PER_BLOCK)
    shared = tl.where(tl.arange(0, PER_BLOCK) == PER_BLOCK - 1, 1.0, 2.0)
    behind = tl.where(queries + 1 >= LENGTH, (queries + 1 - LENGTH) // STRIDE + 1, 0)
    k = load_rows(k_ptr, keys, channels, k_row, N, D, False, D == WIDTH)
    before = blocks * PER_BLOCK - 1
    at = k_ptr + before[:, None] * k_row + channels[None, :]
    there = (before[:, None] >= 0) & (before[:, None] < N) & (channels[None, :] < D)
    k_before = tl.load(at, mask=there, other=0.0)
    found = tl.zeros([ROWS, BLOCKS], tl.float32)
    for within in range(per_group):
        q = load_rows(q_ptr + tl.cast(within, tl.int64) * q_head, queries, channels, q_row, T, D, False, D == WIDTH)
        log = tl.load(log_ptr + tl.cast(within, tl.int64) * T + queries, mask=queries < T, other=float("inf"))
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - log[:, None]
        weights = tl.where(keys[None, :] < behind[:, None], tl.exp2(scores), 0.0)
        found += tl.sum(tl.reshape(weights, (ROWS, BLOCKS, PER_BLOCK)) * shared[None, None, :], 2)
        scores = tl.dot(q, tl.trans(k_before), input_precision=EXACT) * scale - log[:, None]
        seen = (before[None, :] >= 0) & (before[None, :] < behind[:, None])
        found += tl.where(seen, tl.exp2(scores), 0.0)
    return found


@triton.jit
def _importance_kernel(
    q_ptr, k_ptr, log_ptr, out_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, G, PER_GROUP, T, N, M, scale,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The importance of a chunk of blocks to a tile of queries of one group: [B, G, T, M], float32."""
    batch, group = tl.program_id(2) // G, tl.program_id(2) % G
    queries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * BLOCKS
    blocks = begin + tl.arange(0, BLOCKS)
    out_ptr += (tl.program_id(2).to(tl.int64) * T + queries[:, None]) * M + blocks[None, :]
    inside = (queries[:, None] < T) & (blocks[None, :] < M)
    if begin * PER_BLOCK * STRIDE > tl.program_id(0) * ROWS + ROWS - 1:
        tl.store(out_ptr, tl.zeros([ROWS, BLOCKS], tl.float32), mask=inside)  # all of it lies behind the queries
    else:
        q_ptr += batch.to(tl.int64) * q_batch + (group * PER_GROUP).to(tl.int64) * q_head
        k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
        log_ptr += tl.program_id(2).to(tl.int64) * PER_GROUP * T
        found = _importance_of(
            q_ptr, k_ptr, log_ptr, q_head, q_row, k_row, queries, begin, PER_GROUP, T, N, scale,
            LENGTH, STRIDE, PER_BLOCK, ROWS, BLOCKS, D, WIDTH,
        )  # fmt: skip
        tl.store(out_ptr, found, mask=inside)


@triton.jit
def _choose_kernel(
    q_ptr, k_ptr, log_ptr, chosen_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, G, PER_GROUP, T, N, M, scale,
    CHOICES: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The blocks of a tile of queries of one group, as `select` orders them: [B, G, T, CHOICES], int32.

    The best LISTED so far are 64-bit numbers: the importance, whose bits are in the order of the numbers as none is
    below 0, and the block counted from the end, so that of equal ones the earlier is the larger. As long as some
    query's largest of a chunk is above its least of the list, it takes that one's place. No importance goes to memory.
    """
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    queries = tile * ROWS + tl.arange(0, ROWS)
    q_ptr += batch.to(tl.int64) * q_batch + (group * PER_GROUP).to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    log_ptr += tl.program_id(1).to(tl.int64) * PER_GROUP * T
    own = queries // (PER_BLOCK * STRIDE)
    best = tl.zeros([ROWS, LISTED], tl.int64) - 1 - tl.arange(0, LISTED)[None, :]  # none is there twice
    end = tl.minimum((tl.minimum(tile * ROWS + ROWS, T) - 1) // (PER_BLOCK * STRIDE) + 1, M)
    for begin in range(0, end, BLOCKS):
        found = _importance_of(
            q_ptr, k_ptr, log_ptr, q_head, q_row, k_row, queries, begin, PER_GROUP, T, N, scale,
            LENGTH, STRIDE, PER_BLOCK, ROWS, BLOCKS, D, WIDTH,
        )  # fmt: skip
        blocks = begin + tl.arange(0, BLOCKS)[None, :]
        always = (blocks < FIRST) | (blocks > own[:, None] - LAST)
        ranked = tl.where(always, float("inf"), found).to(tl.int32, bitcast=True).to(tl.int64)
        ranked = (ranked << 32) | (0x7FFFFFFF - blocks).to(tl.int64)
        ranked = tl.where(blocks <= own[:, None], ranked, NO_BLOCK)
        most, least = tl.max(ranked, 1), tl.min(best, 1)
        while tl.max((most > least).to(tl.int32), 0) > 0:
            best = tl.where((best == least[:, None]) & (most > least)[:, None], most[:, None], best)
            ranked = tl.where(ranked == most[:, None], NO_BLOCK, ranked)
            most, least = tl.max(ranked, 1), tl.min(best, 1)
    chosen_ptr += (tl.program_id(1).to(tl.int64) * T + queries) * CHOICES
    for choice in range(CHOICES):
        most = tl.max(best, 1)
        block = tl.where(most >= 0, 0x7FFFFFFF - (most & 0x7FFFFFFF), -1).to(tl.int32)
        tl.store(chosen_ptr + choice, block, mask=queries < T)
        best = tl.where(best == most[:, None], NO_BLOCK, best)


@triton.jit
def _selected_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, chosen_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row, G, T, scale,
    SELECTED: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One query of one group over its selected blocks; the group's heads are the rows, filled up to ROWS."""
    query, batch, group = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    rows, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads, inside = group * PER_GROUP + rows, (rows[:, None] < PER_GROUP) & (channels[None, :] < D)
    at = q_ptr + batch.to(tl.int64) * q_batch + query.to(tl.int64) * q_row
    q = tl.load(at + heads[:, None].to(tl.int64) * q_head + channels[None, :], mask=inside, other=0.0)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    chosen_ptr += (tl.program_id(1).to(tl.int64) * T + query) * SELECTED
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    for i in range(SELECTED):
        block = tl.load(chosen_ptr + i)
        keys = block * BLOCK + tl.arange(0, BLOCK)
        seen = (keys <= query) & (keys >= 0)  # a block of -1 has none
        mask = seen[:, None] & (channels[None, :] < D)
        k = tl.load(k_ptr + keys[:, None].to(tl.int64) * k_row + channels[None, :], mask=mask, other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision=EXACT) * scale, NOTHING)
        v = tl.load(v_ptr + keys[:, None].to(tl.int64) * v_row + channels[None, :], mask=mask, other=0.0)
        out, top, total = add_tile(out, top, total, scores, 1.0, v, True)  # its own block comes, at first or later
    row = (batch * G * PER_GROUP + heads).to(tl.int64) * T + query
    tl.store(log_ptr + row, top + tl.log2(total), mask=rows < PER_GROUP)
    at = out_ptr + batch.to(tl.int64) * o_batch + query.to(tl.int64) * o_row
    at += heads[:, None].to(tl.int64) * o_head + channels[None, :]
    tl.store(at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _selected_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, log_ptr, delta_ptr, chosen_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    G, T, scale, natural,
    SELECTED: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of one query of one group, by its selected blocks; rows are as in `_selected_kernel`."""
    query, batch, group = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    rows, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads, inside = group * PER_GROUP + rows, (rows[:, None] < PER_GROUP) & (channels[None, :] < D)
    at = q_ptr + batch.to(tl.int64) * q_batch + query.to(tl.int64) * q_row
    q = tl.load(at + heads[:, None].to(tl.int64) * q_head + channels[None, :], mask=inside, other=0.0)
    at = grad_ptr + batch.to(tl.int64) * g_batch + query.to(tl.int64) * g_row
    grad = tl.load(at + heads[:, None].to(tl.int64) * g_head + channels[None, :], mask=inside, other=0.0)
    row = (batch * G * PER_GROUP + heads).to(tl.int64) * T + query
    log = tl.load(log_ptr + row, mask=rows < PER_GROUP, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=rows < PER_GROUP, other=0.0)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    chosen_ptr += (tl.program_id(1).to(tl.int64) * T + query) * SELECTED
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(SELECTED):
        keys = tl.load(chosen_ptr + i) * BLOCK + tl.arange(0, BLOCK)
        seen = (keys <= query) & (keys >= 0)  # a block of -1 has none
        mask = seen[:, None] & (channels[None, :] < D)
        k = tl.load(k_ptr + keys[:, None].to(tl.int64) * k_row + channels[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + keys[:, None].to(tl.int64) * v_row + channels[None, :], mask=mask, other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - log[:, None])
        weights = tl.where(seen[None, :], weights, 0.0)
        slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=EXACT) - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=EXACT)
    at = dq_ptr + row[:, None] * D + channels[None, :]
    tl.store(at, (dq * natural).to(dq_ptr.dtype.element_ty), mask=inside)


# ---- the function ---------------------------------------------------------------------------------------------------


def importance(
    q_BHTD: torch.Tensor, k_BGND: torch.Tensor, log_BHT: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return the sums of the compressed branch's weights by group and block, each weight times the strides that its key
    shares with the block: float32, [B, G, T, blocks]. log_BHT: the branch's logarithms, of `attend_intervals`."""
    (batch, heads, tokens, size), (groups, count) = q_BHTD.shape, k_BGND.shape[1:3]
    blocks, width = -(-tokens // nsa.block), max(16, triton.next_power_of_2(size))
    out = torch.empty((batch, groups, tokens, blocks), dtype=torch.float32, device=q_BHTD.device)
    rows, chunk = 64, 16
    _importance_kernel[(triton.cdiv(tokens, rows), triton.cdiv(blocks, chunk), batch * groups)](
        q_BHTD, k_BGND, log_BHT, out, *strides_of(q_BHTD, k_BGND), groups, heads // groups, tokens, count, blocks,
        scale * LOG2E.value, LENGTH=nsa.length, STRIDE=nsa.stride, PER_BLOCK=nsa.per_block, ROWS=rows, BLOCKS=chunk,
        D=size, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def choose(
    q_BHTD: torch.Tensor, k_BGND: torch.Tensor, log_BHT: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return `select(importance(…), nsa)`, without a matrix of importance in memory: [B, G, T, selected], int32."""
    (batch, heads, tokens, size), (groups, count) = q_BHTD.shape, k_BGND.shape[1:3]
    blocks = -(-tokens // nsa.block)
    choices, listed = min(nsa.selected, blocks), triton.next_power_of_2(min(nsa.selected, blocks))
    chosen = torch.empty((batch, groups, tokens, choices), dtype=torch.int32, device=q_BHTD.device)
    rows = 64
    _choose_kernel[(triton.cdiv(tokens, rows), batch * groups)](
        q_BHTD, k_BGND, log_BHT, chosen, *strides_of(q_BHTD, k_BGND), groups, heads // groups, tokens, count, blocks,
        scale * LOG2E.value, CHOICES=choices, LISTED=listed, FIRST=nsa.first, LAST=nsa.last, LENGTH=nsa.length,
        STRIDE=nsa.stride, PER_BLOCK=nsa.per_block, ROWS=rows, BLOCKS=16, D=size,
        WIDTH=max(16, triton.next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
    return chosen


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Any, k_BGTD: Any, v_BGTD: Any, chosen_BGTS: Any, block: int, scale: float) -> Any:
        (batch, heads, tokens, _), groups = q_BHTD.shape, k_BGTD.shape[1]
        out = torch.empty_like(q_BHTD)
        log = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q_BHTD.device)
        chosen_BGTS = chosen_BGTS.contiguous()
        _selected_kernel[(tokens, batch * groups)](
            q_BHTD, k_BGTD, v_BGTD, out, log, chosen_BGTS, *strides_of(q_BHTD, k_BGTD, v_BGTD, out), groups, tokens,
            scale * LOG2E.value, **_constants(q_BHTD, groups, chosen_BGTS, block),
        )  # fmt: skip
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, out, log, chosen_BGTS)
        ctx.block, ctx.scale = block, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Any) -> Any:
        q_BHTD, k_BGTD, v_BGTD, out, log, chosen_BGTS = ctx.saved_tensors
        grad_BHTD = grad_BHTD if grad_BHTD.stride(-1) == 1 else grad_BHTD.contiguous()
        (batch, _, tokens, _), groups = q_BHTD.shape, k_BGTD.shape[1]
        delta, dq = output_products(out, grad_BHTD), torch.empty(q_BHTD.shape, dtype=q_BHTD.dtype, device=q_BHTD.device)
        _selected_queries_kernel[(tokens, batch * groups)](
            q_BHTD, k_BGTD, v_BGTD, grad_BHTD, dq, log, delta, chosen_BGTS,
            *strides_of(q_BHTD, k_BGTD, v_BGTD, grad_BHTD), groups, tokens, ctx.scale * LOG2E.value, ctx.scale,
            **_constants(q_BHTD, groups, chosen_BGTS, ctx.block),
        )  # fmt: skip
        blocks = -(-tokens // ctx.block)
        dk, dv = gathered_gradients(
            (q_BHTD, k_BGTD, v_BGTD), grad_BHTD, log, delta, chosen_BGTS, ctx.block, blocks, ctx.scale
        )
        return dq, dk, dv, None, None, None


def _constants(q_BHTD: torch.Tensor, groups: int, chosen_BGTS: torch.Tensor, block: int) -> dict[str, int]:
    heads, size = q_BHTD.shape[1], q_BHTD.shape[3]
    rows = max(16, triton.next_power_of_2(heads // groups))
    return {
        "SELECTED": chosen_BGTS.shape[-1], "PER_GROUP": heads // groups, "ROWS": rows, "BLOCK": block, "D": size,
        "WIDTH": max(16, triton.next_power_of_2(size)), "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def attend_selected(
    q_BHTD: torch.Tensor, branch: KeysValues, chosen_BGTS: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return the attention of each query to the blocks chosen for its group, in causal order: [B, H, T, D]. Gradients
    flow to queries, keys and values."""
    out: torch.Tensor = _Selected.apply(q_BHTD, *branch, chosen_BGTS, nsa.block, scale)
    return out


def nsa_attention(
    q_BHTD: torch.Tensor,
    compressed: KeysValues,
    selected: KeysValues,
    window: KeysValues,
    gates_BHT3: torch.Tensor,
    nsa: Nsa = Nsa(),
) -> torch.Tensor:
    """Return the three answers of whole sequences, times their gates: [B, H, T, D]. Gradients flow to all inputs, as if
    the choice of blocks were given.

    q_BHTD: heads of at most 256 channels, all of one dtype; H is a multiple of G.
    compressed: of `compress`, [B, G, compressed, D]. selected, window: [B, G, T, D].
    gates_BHT3: of the compressed, selected and window answer.

    Raises ValueError for shapes that do not fit.
    """
    (batch, heads, tokens, size), groups = q_BHTD.shape, selected.k.shape[1]
    count = max(0, (tokens - nsa.length) // nsa.stride + 1)
    wanted = {x.shape for x in (*selected, *window)} == {(batch, groups, tokens, size)}
    wanted &= {x.shape for x in compressed} == {(batch, groups, count, size)}
    if not wanted or heads % groups or size > 256 or gates_BHT3.shape != (batch, heads, tokens, 3):
        given = ", ".join(str(tuple(x.shape)) for x in (q_BHTD, *compressed, *selected, *window, gates_BHT3))
        raise ValueError(f"q is [B, H, T, D], branches [B, G, T, D] ({count} compressed), gates [B, H, T, 3]: {given}.")
    scale, device = size**-0.5, q_BHTD.device
    q_BHTD = q_BHTD if q_BHTD.stride(-1) == 1 else q_BHTD.contiguous()
    compressed, selected, window = (
        KeysValues(*(x if x.stride(-1) == 1 else x.contiguous() for x in branch))
        for branch in (compressed, selected, window)
    )
    out = torch.zeros_like(q_BHTD)
    if count:
        intervals = compressed_intervals(tokens, nsa, device)
        coarse, log = WholeAttention.apply(q_BHTD, *compressed, None, intervals, None, scale)
        chosen = choose(q_BHTD.detach(), compressed.k.detach(), log, nsa, scale=scale)
        out = out + coarse * gates_BHT3[..., 0, None]
    else:
        chosen = select(torch.zeros((batch, groups, tokens, -(-tokens // nsa.block)), device=device), nsa)
    out = out + attend_selected(q_BHTD, selected, chosen, nsa, scale=scale) * gates_BHT3[..., 1, None]
    near, _ = WholeAttention.apply(
        q_BHTD, *window, None, KeyMasks(window=nsa.window - 1).intervals(tokens, tokens, device), None, scale
    )
    return out + near * gates_BHT3[..., 2, None]


# ---- ahead of time --------------------------------------------------------------------------------------------------

AOT = tuple(
    ahead_of_time(kernel, tiles, 128, *names, archs=("sm_90",), **dict[str, Any](constants))
    for kernel, tiles, names, constants in (
        (
            _importance_kernel, Tiles(64, 64, 4, 3), ("q k !log !out", "qk", "G PER_GROUP T N M", "scale"),
            {"LENGTH": 32, "STRIDE": 16, "PER_BLOCK": 4, "BLOCKS": 16},
        ),
        (
            _choose_kernel, Tiles(64, 64, 4, 3), ("q k !log #chosen", "qk", "G PER_GROUP T N M", "scale"),
            {"LENGTH": 32, "STRIDE": 16, "PER_BLOCK": 4, "BLOCKS": 16, "CHOICES": 16, "LISTED": 16, "FIRST": 1,
             "LAST": 2},
        ),
        (
            _selected_kernel, Tiles(16, 64, 4, 2), ("q k v out !log #chosen", "qkvo", "G T", "scale"),
            {"SELECTED": 16, "PER_GROUP": 16, "BLOCK": 64},
        ),
        (
            _selected_queries_kernel, Tiles(16, 64, 4, 2),
            ("q k v grad dq !log !delta #chosen", "qkvg", "G T", "scale natural"),
            {"SELECTED": 16, "PER_GROUP": 16, "BLOCK": 64},
        ),
    )
)  # fmt: skip
