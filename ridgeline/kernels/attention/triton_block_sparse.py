"""Attention that reads only listed blocks of keys, forward and backward: BigBird, Longformer, or any mask of blocks.

The mask has one bit for a block of queries and a block of keys. Each block of queries has a list of the key blocks that
it sees, in ascending order, and each block of keys the list of its queries, for the backward pass. A program walks such
a list, so time and traffic follow the number of listed blocks and not the square of the length:

    65,536 tokens in blocks of 128 are 512 x 512 blocks. BigBird with a window of 3, 2 global and 3 random blocks lists
    10 of 512 on average, 2.0 %; where order is causal 5.5 of 256.5, 2.1 % of the causal FLOPs.

Inside the last listed block there may be keys to leave out: those behind the query, where order is causal, and those
behind the last key. All other listed blocks are seen whole, and need no mask. The arithmetic is that of triton_sdpa.py.

Patterns: Zaheer et al., "Big Bird" (2020); Beltagy et al., "Longformer" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    NOTHING,
    Tiles,
    add_tile,
    ahead_of_time,
    check_same_length,
    load_rows,
    output_products,
    strides_of,
    tile_scores,
    tiles_of,
    whole_rows,
)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The blocks of keys that each block of queries sees.

    seen_MNN: bool, [M, blocks, blocks], rows are queries; M is 1, or the number of heads.
    block: tokens of a block: 64, 128 or more, a power of 2.
    causal: a query sees no key behind it. Blocks behind the diagonal are never listed then.

    Raises ValueError for a mask of another shape, or a block that is no power of 2 of at least 16.
    """

    seen_MNN: torch.Tensor
    block: int = 128
    causal: bool = True

    def __post_init__(self) -> None:
        shape = tuple(self.seen_MNN.shape)
        if len(shape) != 3 or shape[1] != shape[2] or self.seen_MNN.dtype != torch.bool:
            raise ValueError(f"a mask is bool, [1 or heads, blocks, blocks], got {self.seen_MNN.dtype} {shape}.")
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"a block has 16, 32, 64, … tokens, got {self.block}.")
        if self.causal:
            object.__setattr__(self, "seen_MNN", self.seen_MNN.tril())

    @cached_property
    def keys_of(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lists of the blocks of queries, as (begin, block): int32, [M * blocks + 1] and [listed]."""
        return _lists(self.seen_MNN)

    @cached_property
    def queries_of(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lists of the blocks of keys."""
        return _lists(self.seen_MNN.mT)

    def dense(self, length: int) -> torch.Tensor:
        """Return the mask by query and key, [M, length, length]."""
        seen = self.seen_MNN.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)[:, :length, :length]
        return seen.tril() if self.causal else seen

    @property
    def density(self) -> float:
        """The share of all blocks that is listed."""
        return float(self.seen_MNN.float().mean())


def big_bird(
    blocks: int, *, window: int = 3, first: int = 2, random: int = 3, seed: int = 0, heads: int = 1
) -> torch.Tensor:
    """Return BigBird's mask, [heads, blocks, blocks]: a window of so many blocks around each, the `first` blocks, which
    see all and are seen by all, and `random` blocks for each row, others in each head."""
    generator = torch.Generator().manual_seed(seed)
    seen = longformer(blocks, window=window, first=first).expand(heads, -1, -1).clone()
    draws = torch.rand((heads, blocks, blocks), generator=generator).masked_fill(seen, -1.0)
    chosen = draws.topk(min(random, blocks), -1)
    return seen.scatter(-1, chosen.indices, chosen.values >= 0) | seen


def longformer(blocks: int, *, window: int = 3, first: int = 1) -> torch.Tensor:
    """Return Longformer's mask, [1, blocks, blocks]: a window of so many blocks around each, and the `first` blocks."""
    at = torch.arange(blocks)
    seen = (at[:, None] - at[None, :]).abs() <= window // 2
    seen[:, :first] = True
    seen[:first] = True
    return seen[None]


def block_sparse_reference(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, mask: BlockMask, *, scale: float | None = None
) -> torch.Tensor:
    """Return the result of `block_sparse` from its definition: all scores at once, in the inputs' dtype."""
    per_group = q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (each.repeat_interleave(per_group, 1) for each in (k_BGTD, v_BGTD))
    scores = q_BHTD @ k_BHTD.mT * (q_BHTD.shape[-1] ** -0.5 if scale is None else scale)
    seen = mask.dense(q_BHTD.shape[2]).to(q_BHTD.device)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.where(seen, weights, 0.0) @ v_BHTD  # a query that sees nothing has weights of NaN


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _key_tile(listed_ptr, i, PER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the first token of tile i of a list of blocks, which have PER tiles each."""
    return tl.load(listed_ptr + i // PER) * BLOCK + i % PER * TILE


@triton.jit
def _meet_keys(
    out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, behind, listed_ptr, begin, end, T, scale,
    MASKED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let a tile of queries meet tiles of listed blocks of keys."""
    channels = tl.arange(0, WIDTH)
    for i in range(begin, end):
        keys = _key_tile(listed_ptr, i, BLOCK // COLUMNS, BLOCK, COLUMNS) + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, keys, channels, k_row, T, D, not MASKED, D == WIDTH)
        scores = tile_scores(q, k, queries, keys, 0, queries * 0, behind, scale, 0.0, False, MASKED)
        v = load_rows(v_ptr, keys, channels, v_row, T, D, not MASKED, D == WIDTH)
        out, top, total = add_tile(out, top, total, scores, 1.0, v, MASKED)
    return out, top, total


@triton.jit
def _listed_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, begins_ptr, listed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    H, PER_GROUP, T, N, scale, per_head,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head. per_head: 1 where each head has lists of its own, else 0."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head
    behind = tl.minimum(queries + 1, T) if CAUSAL else queries * 0 + T
    PER: tl.constexpr = BLOCK // COLUMNS
    own = begins_ptr + head * per_head * N + tile * ROWS // BLOCK
    begin, end = tl.load(own) * PER, tl.load(own + 1) * PER
    whole = tl.maximum(end - PER, begin)
    q = load_rows(q_ptr, queries, channels, q_row, T, D, False, D == WIDTH)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    out, top, total = _meet_keys(
        out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, behind, listed_ptr, begin, whole, T, scale,
        False, COLUMNS, BLOCK, D, WIDTH,
    )  # fmt: skip
    out, top, total = _meet_keys(
        out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, behind, listed_ptr, whole, end, T, scale,
        True, COLUMNS, BLOCK, D, WIDTH,
    )  # fmt: skip
    out, log = whole_rows(out, top, total)
    tl.store(log_ptr + (batch * H + head).to(tl.int64) * T + queries, log, mask=queries < T)
    at = batch.to(tl.int64) * o_batch + head.to(tl.int64) * o_head + queries[:, None] * o_row + channels[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(queries[:, None] < T) & (channels[None, :] < D))


@triton.jit
def _meet_queries(
    dk, dv, k, v, q_ptr, grad_ptr, log_ptr, delta_ptr, q_row, g_row, keys, listed_ptr, begin, end, T, scale,
    MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let a tile of keys meet tiles of listed blocks of queries. MASKED: keys behind a query are not seen."""
    channels = tl.arange(0, WIDTH)
    for i in range(begin, end):
        queries = _key_tile(listed_ptr, i, BLOCK // ROWS, BLOCK, ROWS) + tl.arange(0, ROWS)
        q = load_rows(q_ptr, queries, channels, q_row, T, D, False, D == WIDTH)
        grad = load_rows(grad_ptr, queries, channels, g_row, T, D, False, D == WIDTH)
        log = tl.load(log_ptr + queries, mask=queries < T, other=float("inf"))
        delta = tl.load(delta_ptr + queries, mask=queries < T, other=0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=EXACT) * scale - log[None, :])
        if MASKED:
            weights = tl.where(keys[:, None] <= queries[None, :], weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=EXACT)
        slopes = weights * (tl.dot(v, tl.trans(grad), input_precision=EXACT) - delta[None, :])
        dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision=EXACT)
    return dk, dv


@triton.jit
def _listed_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, log_ptr, delta_ptr, begins_ptr, listed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, G, T, N, scale, natural, per_head,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values of one group: sums over the listed queries of all its heads. Where order
    is causal, only the first listed block needs a mask."""
    tile = tl.program_id(0)
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    keys, channels = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    k = load_rows(k_ptr, keys, channels, k_row, T, D, False, D == WIDTH)
    v = load_rows(v_ptr, keys, channels, v_row, T, D, False, D == WIDTH)
    dk, dv = tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS, WIDTH], tl.float32)
    PER: tl.constexpr = BLOCK // ROWS
    for within in range(H // G):
        head = group * (H // G) + within
        own = begins_ptr + head * per_head * N + tile * COLUMNS // BLOCK
        begin, end = tl.load(own) * PER, tl.load(own + 1) * PER
        whole = tl.minimum(begin + PER, end) if CAUSAL else begin
        row = (batch * H + head).to(tl.int64) * T
        q_own = q_ptr + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        g_own = grad_ptr + batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
        if CAUSAL:
            dk, dv = _meet_queries(
                dk, dv, k, v, q_own, g_own, log_ptr + row, delta_ptr + row, q_row, g_row, keys, listed_ptr, begin,
                whole, T, scale, True, ROWS, BLOCK, D, WIDTH,
            )  # fmt: skip
        dk, dv = _meet_queries(
            dk, dv, k, v, q_own, g_own, log_ptr + row, delta_ptr + row, q_row, g_row, keys, listed_ptr, whole, end,
            T, scale, False, ROWS, BLOCK, D, WIDTH,
        )  # fmt: skip
    at = (batch * G + group).to(tl.int64) * T * D + keys[:, None] * D + channels[None, :]
    inside = (keys[:, None] < T) & (channels[None, :] < D)
    tl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _listed_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, log_ptr, delta_ptr, begins_ptr, listed_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, PER_GROUP, T, N, scale, natural, per_head,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    grad_ptr += batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
    k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head
    row = (batch * H + head).to(tl.int64) * T
    log = tl.load(log_ptr + row + queries, mask=queries < T, other=float("inf"))
    delta = tl.load(delta_ptr + row + queries, mask=queries < T, other=0.0)
    behind = tl.minimum(queries + 1, T) if CAUSAL else queries * 0 + T
    PER: tl.constexpr = BLOCK // COLUMNS
    own = begins_ptr + head * per_head * N + tile * ROWS // BLOCK
    begin, end = tl.load(own) * PER, tl.load(own + 1) * PER
    q = load_rows(q_ptr, queries, channels, q_row, T, D, False, D == WIDTH)
    grad = load_rows(grad_ptr, queries, channels, g_row, T, D, False, D == WIDTH)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(begin, end):
        keys = _key_tile(listed_ptr, i, PER, BLOCK, COLUMNS) + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, keys, channels, k_row, T, D, False, D == WIDTH)
        v = load_rows(v_ptr, keys, channels, v_row, T, D, False, D == WIDTH)
        scores = tile_scores(q, k, queries, keys, 0, queries * 0, behind, scale, 0.0, False, True)
        weights = tl.exp2(scores - log[:, None])
        slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=EXACT) - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=EXACT)
    at = dq_ptr + (row + queries)[:, None] * D + channels[None, :]
    inside = (queries[:, None] < T) & (channels[None, :] < D)
    tl.store(at, (dq * natural).to(dq_ptr.dtype.element_ty), mask=inside)


# ---- the function ---------------------------------------------------------------------------------------------------


def _lists(seen_MNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place at which the list of each row begins, and the lists, one behind the other: int32."""
    counts = seen_MNN.sum(-1).flatten()
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return begins.int(), seen_MNN.nonzero()[:, 2].int().contiguous()


def _tiles(kernel: str, width: int, itemsize: int, block: int) -> Tiles:
    tiles = tiles_of(kernel, width, itemsize)
    return Tiles(min(tiles.rows, block), min(tiles.columns, block), tiles.warps, tiles.stages)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Any, k_BGTD: Any, v_BGTD: Any, mask: BlockMask, scale: float) -> Any:
        batch, heads, length, size = q_BHTD.shape
        out_BHTD = torch.empty(q_BHTD.shape, dtype=q_BHTD.dtype, device=q_BHTD.device)
        log_BHT = torch.empty((batch, heads, length), dtype=torch.float32, device=q_BHTD.device)
        width = max(16, triton.next_power_of_2(size))
        tiles = _tiles("forward", width, q_BHTD.itemsize, mask.block)
        lists = [each.to(q_BHTD.device) for each in mask.keys_of]
        masks, blocks = mask.seen_MNN.shape[:2]
        _listed_forward_kernel[(triton.cdiv(length, tiles.rows), batch * heads)](
            q_BHTD, k_BGTD, v_BGTD, out_BHTD, log_BHT, *lists, *strides_of(q_BHTD, k_BGTD, v_BGTD, out_BHTD),
            heads, heads // k_BGTD.shape[1], length, blocks, scale * LOG2E.value, int(masks > 1),
            CAUSAL=mask.causal, ROWS=tiles.rows, COLUMNS=tiles.columns, BLOCK=mask.block, D=size, WIDTH=width,
            **tiles.launch,
        )  # fmt: skip
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, out_BHTD, log_BHT)
        ctx.mask, ctx.scale = mask, scale
        return out_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Any) -> Any:
        q_BHTD, k_BGTD, v_BGTD, out_BHTD, log_BHT = ctx.saved_tensors
        mask, scale, device = ctx.mask, ctx.scale, q_BHTD.device
        grad_BHTD = grad_BHTD if grad_BHTD.stride(-1) == 1 else grad_BHTD.contiguous()
        batch, heads, length, size = q_BHTD.shape
        groups, width = k_BGTD.shape[1], max(16, triton.next_power_of_2(size))
        masks, blocks = mask.seen_MNN.shape[:2]
        delta_BHT, dq_BHTD = output_products(out_BHTD, grad_BHTD), torch.empty_like(out_BHTD)
        dk_BGTD, dv_BGTD = (torch.empty(each.shape, dtype=each.dtype, device=device) for each in (k_BGTD, v_BGTD))
        strides = strides_of(q_BHTD, k_BGTD, v_BGTD, grad_BHTD)
        common = {"CAUSAL": mask.causal, "BLOCK": mask.block, "D": size, "WIDTH": width}
        factors = scale * LOG2E.value, scale, int(masks > 1)
        tiles = _tiles("keys", width, q_BHTD.itemsize, mask.block)
        _listed_keys_kernel[(triton.cdiv(length, tiles.columns), batch * groups)](
            q_BHTD, k_BGTD, v_BGTD, grad_BHTD, dk_BGTD, dv_BGTD, log_BHT, delta_BHT,
            *(each.to(device) for each in mask.queries_of), *strides, heads, groups, length, blocks, *factors,
            ROWS=tiles.rows, COLUMNS=tiles.columns, **common, **tiles.launch,
        )  # fmt: skip
        tiles = _tiles("queries", width, q_BHTD.itemsize, mask.block)
        _listed_queries_kernel[(triton.cdiv(length, tiles.rows), batch * heads)](
            q_BHTD, k_BGTD, v_BGTD, grad_BHTD, dq_BHTD, log_BHT, delta_BHT,
            *(each.to(device) for each in mask.keys_of), *strides, heads, heads // groups, length, blocks, *factors,
            ROWS=tiles.rows, COLUMNS=tiles.columns, **common, **tiles.launch,
        )  # fmt: skip
        return dq_BHTD, dk_BGTD, dv_BGTD, None, None


def block_sparse(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, mask: BlockMask, *, scale: float | None = None
) -> torch.Tensor:
    """Return the attention of whole sequences over the keys that `mask` lists, [batch, heads, tokens, channels];
    gradients flow to q, k and v. A query without keys gives 0.

    q_BHTD, k_BGTD, v_BGTD: one dtype, at most 256 channels a head; H is a multiple of G.
    scale: of scores (default: channels ** -0.5).

    Raises ValueError for shapes that do not fit each other or the mask.
    """
    check_same_length(q_BHTD, k_BGTD, v_BGTD)
    heads, length, size = q_BHTD.shape[1:]
    masks, blocks = mask.seen_MNN.shape[:2]
    if masks not in (1, heads) or blocks != -(-length // mask.block):
        shape = tuple(mask.seen_MNN.shape)
        raise ValueError(f"{heads} heads and {length} tokens in blocks of {mask.block} do not fit a mask of {shape}.")
    q_BHTD, k_BGTD, v_BGTD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTD, k_BGTD, v_BGTD))
    return _BlockSparse.apply(q_BHTD, k_BGTD, v_BGTD, mask, size**-0.5 if scale is None else scale)


# ---- ahead of time --------------------------------------------------------------------------------------------------

AOT = tuple(
    ahead_of_time(kernel, tiles_of(which, 128), 128, *names, archs=("sm_90",), CAUSAL=True, BLOCK=128)
    for kernel, which, *names in (
        (
            _listed_forward_kernel, "forward", "q k v out !log #begins #listed", "qkvo", "H PER_GROUP T N per_head",
            "scale",
        ),
        (
            _listed_keys_kernel, "keys", "q k v grad dk dv !log !delta #begins #listed", "qkvg", "H G T N per_head",
            "scale natural",
        ),
        (
            _listed_queries_kernel, "queries", "q k v grad dq !log !delta #begins #listed", "qkvg",
            "H PER_GROUP T N per_head", "scale natural",
        ),
    )
)  # fmt: skip
