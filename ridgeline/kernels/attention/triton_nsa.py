"""Native sparse attention: compressed keys, a few selected blocks and a window, weighted by gates.

Each query has three answers (Yuan et al., "Native Sparse Attention", 2025), each from keys and values of its own:

    compressed   one key for 32 tokens, every 16 tokens: a weighted mean, with weights that are learned by place
    selected     the blocks of 64 tokens whose compressed keys got most weight, the first and the last two always; one
                 choice for all heads of a group
    window       the last 512 tokens

Of 65,536 tokens, the last query reads 4,096 compressed keys, 1,024 selected ones and 512 of the window. All queries
together read 9.2 times fewer than in dense attention, which is the limit of the gain where rates are equal.

    compress     a weighted mean, of keys and of values
    compressed   `attend_intervals` of triton_sdpa.py, whose logarithms the next step needs; on Hopper
                 hopper_compressed.py
    importance   the weights again, summed over the heads of a group and over what a block shares with the compressed
                 keys. A tile of queries walks over chunks of keys, and heads are a loop
    selection    in the same kernel: the best blocks so far are a sorted list in registers, to which a chunk is sorted.
                 Neither scores nor importance go to memory
    window       `attend_intervals`
    selected     lists of queries by block (triton_selected.py). There the answers are added with the gates of each
                 query and head

    backward     as if the choice of blocks were given. The compressed branch and the window have triton_sdpa.py's
                 gradients
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention import hopper_compressed
from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    KeyMasks,
    Tiles,
    WholeAttention,
    ahead_of_time,
    attend_intervals,
    load_rows,
    strides_of,
)
from ridgeline.kernels.attention.triton_selected import Branches, SelectedBlocks, add_selected
from ridgeline.kernels.base.launch import INTERPRETED, compute_capability

REGISTERS = 128  # of the choice, so that two programs fit a multiprocessor
NO_BLOCK = tl.constexpr(-1)  # less than every number of a block


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


def compress_reference(x_BGTD: torch.Tensor, weights_LD: torch.Tensor, nsa: Nsa = Nsa()) -> torch.Tensor:
    """Return the result of `compress` from its definition: all tokens of all keys at once, in the inputs' dtype."""
    if x_BGTD.shape[2] < nsa.length:
        return x_BGTD[:, :, :0]
    windows = x_BGTD.unfold(2, nsa.length, nsa.stride)  # [B, G, compressed, D, length]
    return torch.einsum("bgndl,ld->bgnd", windows, weights_LD.to(x_BGTD.dtype)).contiguous()


def compress(x_BGTD: torch.Tensor, weights_LD: torch.Tensor, nsa: Nsa = Nsa()) -> torch.Tensor:
    """Return the weighted means of every `length` tokens, `stride` apart: [B, G, compressed, D]. Sums are in float32.

    weights_LD: by place and channel, in the caller's hands (a uniform 1 / length is the mean).
    """
    if x_BGTD.dtype == torch.float64 or x_BGTD.shape[2] < nsa.length or not (x_BGTD.is_cuda or INTERPRETED):
        return compress_reference(x_BGTD, weights_LD, nsa)
    out: torch.Tensor = _Means.apply(x_BGTD, weights_LD, nsa)
    return out


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BGTD: Any, weights_LD: Any, nsa: Nsa) -> Any:
        ctx.save_for_backward(x_BGTD, weights_LD)
        ctx.nsa = nsa
        x_BGTD = x_BGTD if x_BGTD.stride(-1) == 1 else x_BGTD.contiguous()
        batch, groups, tokens, size = x_BGTD.shape
        count, rows = (tokens - nsa.length) // nsa.stride + 1, 16
        out = torch.empty((batch, groups, count, size), dtype=x_BGTD.dtype, device=x_BGTD.device)
        _means_kernel[(triton.cdiv(count, rows), batch * groups)](
            x_BGTD, weights_LD.contiguous(), out, *strides_of(x_BGTD), groups, count, LENGTH=nsa.length,
            STRIDE=nsa.stride, ROWS=rows, D=size, WIDTH=max(16, triton.next_power_of_2(size)), num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad_BGND: Any) -> Any:
        with torch.enable_grad():
            x_BGTD, weights_LD = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = compress_reference(x_BGTD, weights_LD, ctx.nsa)
            return *torch.autograd.grad(out, (x_BGTD, weights_LD), grad_BGND), None


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
def _means_kernel(
    x_ptr, weights_ptr, out_ptr, x_batch, x_head, x_row, G, N,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A few weighted means of one group, [B, G, N, D]."""
    keys, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (keys[:, None] < N) & (channels[None, :] < D)
    x_ptr += (tl.program_id(1) // G).to(tl.int64) * x_batch + (tl.program_id(1) % G).to(tl.int64) * x_head
    x_ptrs = x_ptr + (keys * STRIDE).to(tl.int64)[:, None] * x_row + channels[None, :]
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for place in range(LENGTH):
        weights = tl.load(weights_ptr + place * D + channels, mask=channels < D, other=0.0).to(tl.float32)
        found += tl.load(x_ptrs + place * x_row, mask=inside, other=0.0).to(tl.float32) * weights[None, :]
    to = out_ptr + (tl.program_id(1).to(tl.int64) * N + keys[:, None]) * D + channels[None, :]
    tl.store(to, found.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _choose_kernel(
    q_ptr, k_ptr, minus_log_ptr, chosen_ptr, importance_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
    G, PER_GROUP, T, N, M, scale,
    CHOICES: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The blocks of a tile of queries of one group, as `select` orders them: [B, G, T, CHOICES], int32. importance_ptr:
    [B, G, T, M], float32, or None. minus_log_ptr: the opposites of the logarithms, since an instruction that made them
    would wait for them among those of the product.

    A chunk of keys meets the queries of each head in turn, whose weights add up in registers. A block shares two
    strides with each of its compressed keys but the last, and one with that and with the key that begins one stride
    before the block: `most` sums the weights of a block's own keys, `last` those of its last. Keys are read in the
    order in which a thread of a warpgroup's product has all keys of a block, so its sums stay in the thread.

    Without MASKED also keys behind a query weigh something. They share strides with the query's own block and the one
    before alone, which are always chosen if LAST is at least 2.

    The best LISTED so far, of at most BLOCKS, are 64-bit numbers: the importance, whose bits are in the order of the
    numbers as none is below 0, and the block counted from the end, so that of equal ones the earlier is the larger.
    The largest of a descending list and the LISTED last of a chunk in ascending order, one by one, are the best of
    both.
    """
    KEYS: tl.constexpr = BLOCKS * PER_BLOCK
    HALF: tl.constexpr = PER_BLOCK // 2
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    queries, channels, within = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCKS)[None, :]
    q_ptr += batch.to(tl.int64) * q_batch + (group * PER_GROUP).to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    minus_log_ptr += tl.program_id(1).to(tl.int64) * PER_GROUP * T
    own = queries // (PER_BLOCK * STRIDE)
    behind = tl.where(queries + 1 >= LENGTH, (queries + 1 - LENGTH) // STRIDE + 1, 0)
    order = tl.arange(0, KEYS)
    if PER_BLOCK > 1:
        order = (
            order // (4 * PER_BLOCK) * 4 * PER_BLOCK + order // 2 % 4 * PER_BLOCK + order // 8 % HALF * 2 + order % 2
        )
    is_last = (tl.arange(0, PER_BLOCK) == PER_BLOCK - 1)[None, None, :]
    best = tl.full([ROWS, LISTED], NO_BLOCK, tl.int64)
    before = tl.zeros([ROWS], tl.float32)  # of the key that begins one stride before the chunk
    end = tl.minimum((tl.minimum(tile * ROWS + ROWS, T) - 1) // (PER_BLOCK * STRIDE) + 1, M)
    for begin in range(0, end, BLOCKS):
        keys = begin * PER_BLOCK + order
        k = load_rows(k_ptr, keys, channels, k_row, N, D, False, D == WIDTH)
        most, last = tl.zeros([ROWS, BLOCKS], tl.float32), tl.zeros([ROWS, BLOCKS], tl.float32)
        for head in range(PER_GROUP):
            q = load_rows(q_ptr + tl.cast(head, tl.int64) * q_head, queries, channels, q_row, T, D, False, D == WIDTH)
            at = minus_log_ptr + tl.cast(head, tl.int64) * T + queries
            minus_log = tl.load(at, mask=queries < T, other=float("-inf"))
            weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale + minus_log[:, None])
            if MASKED:
                weights = tl.where(keys[None, :] < behind[:, None], weights, 0.0)
            if PER_BLOCK > 1:
                weights = tl.reshape(weights, (ROWS, BLOCKS // 4, HALF, 4, 2)).permute(0, 1, 3, 2, 4)
                weights = tl.reshape(weights, (ROWS, BLOCKS, PER_BLOCK))
                most += tl.sum(weights, 2)
                last += tl.sum(tl.where(is_last, weights, 0.0), 2)
            else:
                most += weights
        if PER_BLOCK == 1:
            last = most
        previous = tl.gather(last, tl.broadcast_to(tl.maximum(within - 1, 0), (ROWS, BLOCKS)), 1)
        found = 2.0 * most - last + tl.where(within == 0, before[:, None], previous)
        before = tl.sum(tl.where(within == BLOCKS - 1, last, 0.0), 1)
        blocks = begin + within
        if importance_ptr is not None:
            to = importance_ptr + (tl.program_id(1).to(tl.int64) * T + queries[:, None]) * M + blocks
            tl.store(to, found, mask=(queries[:, None] < T) & (blocks < M))
        always = (blocks < FIRST) | (blocks > own[:, None] - LAST)
        ranked = tl.where(always, float("inf"), found).to(tl.int32, bitcast=True).to(tl.int64)
        ranked = (ranked << 32) | (0x7FFFFFFF - blocks).to(tl.int64)
        ranked = tl.where(blocks <= own[:, None], ranked, NO_BLOCK)
        largest = tl.reshape(tl.sort(ranked, 1), (ROWS, BLOCKS // LISTED, LISTED))
        largest = tl.max(largest, 1)  # the last ones, as the order is ascending
        best = tl.sort(tl.maximum(best, largest), 1, descending=True)
    choices = tl.arange(0, LISTED)[None, :]
    to = chosen_ptr + (tl.program_id(1).to(tl.int64) * T + queries[:, None]) * CHOICES + choices
    block = tl.where(best >= 0, 0x7FFFFFFF - (best & 0x7FFFFFFF), -1).to(tl.int32)
    tl.store(to, block, mask=(queries[:, None] < T) & (choices < CHOICES))


# ---- the function ---------------------------------------------------------------------------------------------------


def importance(
    q_BHTD: torch.Tensor, k_BGND: torch.Tensor, log_BHT: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return the sums of the compressed branch's weights by group and block, each weight times the strides that its key
    shares with the block: float32, [B, G, T, blocks]. log_BHT: the branch's logarithms, of `attend_intervals`."""
    blocks = -(-q_BHTD.shape[2] // nsa.block)
    out = torch.zeros((len(q_BHTD), k_BGND.shape[1], q_BHTD.shape[2], blocks), device=q_BHTD.device)
    _choose(q_BHTD, k_BGND, log_BHT, nsa, scale, out)
    return out


def choose(
    q_BHTD: torch.Tensor, k_BGND: torch.Tensor, log_BHT: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return `select(importance(…), nsa)`, without a matrix of importance in memory: [B, G, T, selected], int32."""
    return _choose(q_BHTD, k_BGND, log_BHT, nsa, scale, None)


def _choose(
    q_BHTD: torch.Tensor, k_BGND: torch.Tensor, log_BHT: torch.Tensor, nsa: Nsa, scale: float,
    importance_BGTM: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    (batch, heads, tokens, size), (groups, count) = q_BHTD.shape, k_BGND.shape[1:3]
    blocks, width = -(-tokens // nsa.block), max(16, triton.next_power_of_2(size))
    choices = min(nsa.selected, blocks)
    listed = triton.next_power_of_2(choices)
    chosen = torch.empty((batch, groups, tokens, choices), dtype=torch.int32, device=q_BHTD.device)
    tiles = choice_tiles(width, q_BHTD.itemsize)
    few = q_BHTD.itemsize == 2 and width <= 128 and compute_capability(q_BHTD.device) == (9, 0)
    _choose_kernel[(triton.cdiv(tokens, tiles.rows), batch * groups)](
        q_BHTD, k_BGND, log_BHT.neg(), chosen, importance_BGTM, *strides_of(q_BHTD, k_BGND), groups, heads // groups,
        tokens, count, blocks, scale * LOG2E.value, CHOICES=choices, LISTED=listed, FIRST=nsa.first,
        LAST=nsa.last, MASKED=importance_BGTM is not None or nsa.last < 2, LENGTH=nsa.length, STRIDE=nsa.stride,
        PER_BLOCK=nsa.per_block, ROWS=tiles.rows, BLOCKS=max(4, tiles.columns // nsa.per_block, listed), D=size,
        WIDTH=width, **tiles.launch, **({"maxnreg": REGISTERS} if few else {}),
    )  # fmt: skip
    return chosen


def choice_tiles(width: int, itemsize: int = 2) -> Tiles:
    """Return the tiles of the choice for heads of so many channels, a power of 2. Columns are compressed keys."""
    return Tiles(64, 32, 4, 1) if itemsize > 2 else Tiles(64, 128, 8, 3)


def attend_selected(
    q_BHTD: torch.Tensor, branch: KeysValues, chosen_BGTS: torch.Tensor, nsa: Nsa = Nsa(), *, scale: float
) -> torch.Tensor:
    """Return the attention of each query to the blocks chosen for its group, in causal order: [B, H, T, D]. Gradients
    flow to queries, keys and values."""
    return add_selected(q_BHTD, *branch, chosen_BGTS, None, SelectedBlocks(nsa.block), scale=scale)


class _Compressed(WholeAttention):
    """The compressed branch, with its logarithms. Gradients are those of intervals."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_BHTD: Any, k_BGND: Any, v_BGND: Any, nsa: Nsa, scale: float
    ) -> Any:
        intervals = compressed_intervals(q_BHTD.shape[2], nsa, q_BHTD.device)
        if hopper_compressed.supports(q_BHTD, k_BGND, nsa.length):
            k_BGND, v_BGND = k_BGND.contiguous(), v_BGND.contiguous()
            out, log = hopper_compressed.attend_compressed(q_BHTD, k_BGND, v_BGND, nsa.length, nsa.stride, scale)
        else:
            out, log = attend_intervals(q_BHTD, k_BGND, v_BGND, intervals, scale)
        ctx.save_for_backward(q_BHTD, k_BGND, v_BGND, None, out, log, None)
        ctx.scale, ctx.intervals = scale, intervals
        ctx.mark_non_differentiable(log)
        return out, log


def attend_compressed(
    q_BHTD: torch.Tensor, compressed: KeysValues, nsa: Nsa = Nsa(), *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to compressed keys, [B, H, T, D], and the logarithm to base 2 of each query's sum of
    exponentials, float32, [B, H, T]; inf for a query without keys, whose output is 0. Gradients flow to all inputs."""
    found: tuple[torch.Tensor, torch.Tensor] = _Compressed.apply(q_BHTD, *compressed, nsa, scale)
    return found


def attend_window(q_BHTD: torch.Tensor, window: KeysValues, nsa: Nsa = Nsa(), *, scale: float) -> torch.Tensor:
    """Return the attention to the last `nsa.window` tokens: [B, H, T, D]. Gradients flow to all inputs."""
    intervals = KeyMasks(window=nsa.window - 1).intervals(q_BHTD.shape[2], q_BHTD.shape[2], q_BHTD.device)
    out: torch.Tensor = WholeAttention.apply(q_BHTD, *window, None, intervals, None, scale, nsa.window)[0]
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
    near = attend_window(q_BHTD, window, nsa, scale=scale)
    if count:
        coarse, log = attend_compressed(q_BHTD, compressed, nsa, scale=scale)
        chosen = choose(q_BHTD.detach(), compressed.k.detach(), log, nsa, scale=scale)
    else:
        coarse = None
        chosen = select(torch.zeros((batch, groups, tokens, -(-tokens // nsa.block)), device=device), nsa)
    branches, blocks = Branches(coarse, near, gates_BHT3), SelectedBlocks(nsa.block, nsa.first, nsa.last)
    return add_selected(q_BHTD, *selected, chosen, branches, blocks, scale=scale)


# ---- ahead of time --------------------------------------------------------------------------------------------------

AOT = (
    ahead_of_time(
        _choose_kernel, choice_tiles(128), 128, "q k !minus_log #chosen", "qk", "G PER_GROUP T N M", "scale",
        archs=("sm_90",), importance_ptr=None, LENGTH=32, STRIDE=16, PER_BLOCK=4, BLOCKS=32, CHOICES=16, LISTED=16,
        FIRST=1, LAST=2, MASKED=False,
    ),
    ahead_of_time(
        _means_kernel, Tiles(16, 0, 4, 3), 128, "x weights out", "x", "G N", "", archs=("sm_90",), kind="fp32",
        LENGTH=32, STRIDE=16,
    ),
)  # fmt: skip
