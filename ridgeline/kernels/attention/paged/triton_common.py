"""The common parts of attention's kernels: how one is cut, finding a tile's keys in the cache, and their logits.

Legend:
    K  keys of a tile
    M  queries
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ridgeline.kernels.base.tree import NODES
from ridgeline.kernels.base.triton_levels import unit
from ridgeline.kernels.base.triton_math import popcount

LOG2E = tl.constexpr(1.4426950408889634)
LAST_NODE = tl.constexpr(NODES - 1)
LOWEST = tl.constexpr(-1e30)  # a running maximum begins with it; it is finite, so that no difference is inf - inf


@dataclass(frozen=True)
class Cut:
    """One way to run a kernel: the queries and the keys of a tile, powers of two from 16 on, warps, and tiles of keys
    in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def load_blocks(table_ptr, start, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the ids of the blocks that hold keys start … start + TILE: one id if a block holds all of them, else one
    per key [K]."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        key_K = start + tl.arange(0, TILE)
        return tl.load(table_ptr + key_K.to(tl.uint32) // BLOCK_SIZE, mask=key_K < end, other=0)


@triton.jit
def place_in_blocks(stride_token, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the part of keys' offsets [K] that is the same in every tile. Tiles start at multiples of their length."""
    n_K = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        return n_K * stride_token
    else:
        return n_K % BLOCK_SIZE * stride_token


@triton.jit
def place_of_blocks(blocks, start, stride_block, stride_token, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the rest of keys' offsets [K] in the cache, in 64 bits: a cache has more than 2³¹ elements."""
    if BLOCK_SIZE % TILE == 0:
        first = blocks.to(tl.int64) * stride_block + start % BLOCK_SIZE * stride_token
        return tl.full((TILE,), 0, tl.int64) + first
    else:
        return blocks.to(tl.int64) * stride_block


@triton.jit
def load_scales(
    scale_ptr, blocks, start, readable_K, stride_block, stride_token,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Return the scales of a tile's keys, and those of its values times the format's unit [K]. Without levels there are
    none.

    The two bfloat16 of a row are one word, which is wide enough to be copied ahead with the tile.
    """
    if KV is None:
        return start, start
    elif scale_ptr.dtype.element_ty == tl.int32:
        place_K = place_of_blocks(blocks, start, stride_block, stride_token, TILE, BLOCK_SIZE)
        place_K += place_in_blocks(stride_token, TILE, BLOCK_SIZE)
        words_K = tl.load(scale_ptr + place_K, mask=readable_K, other=0)
        k_scale_K = (words_K << 16).to(tl.float32, bitcast=True)
        return k_scale_K, (words_K & -0x10000).to(tl.float32, bitcast=True) * unit(KV)
    else:  # the model's own
        nothing_K = tl.zeros((TILE,), tl.float32)
        return nothing_K + tl.load(scale_ptr), nothing_K + tl.load(scale_ptr + 1) * unit(KV)


@triton.jit
def held(x):
    """Return the same values. On NVIDIA the program waits for them only here."""
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACK)


@triton.jit
def logits(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Return the logits: scores that are scaled, capped and in base 2, since the softmax uses exp2. scale: log2(e)
    times the op's."""
    if SOFTCAP:
        x = scores * (scale / (LOG2E * softcap))
        tanh = 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)
        return tanh * (softcap * LOG2E)
    else:
        return scores * scale


@triton.jit
def load_slopes(slopes_ptr, head, ALIBI: tl.constexpr):
    """Return the slopes of these heads: the loss of their logits per token of distance, in base 2; or, of biases by
    distance, the heads' pointers to these. They are never written, so no kernel need wait for them."""
    if ALIBI > 1:
        return slopes_ptr + head * ALIBI
    elif ALIBI:
        return tl.load(slopes_ptr + head) * LOG2E
    else:
        return head


@triton.jit
def nearer(x, slopes, offset, ALIBI: tl.constexpr):
    """Subtract from logits what they lose by distance (ALiBi, arXiv 2108.12409), or add what they gain by it.

    offset: the key's position less the query's. It keeps the digits of near keys, however long the row is.
    """
    if ALIBI > 1:
        return x + tl.load(slopes + tl.minimum(tl.maximum(-offset, 0), ALIBI - 1)) * LOG2E
    elif ALIBI:
        return x + slopes * offset.to(tl.float32)
    else:
        return x


@triton.jit
def load_tree(bits_ptr, base_ptr, token_M, real_M, window, WINDOW: tl.constexpr):
    """Return the queries' bits (unsigned), bases and positions [M]; see kernels/base/tree.py. Bits of nodes before the
    window are left out. Queries that are not real see nothing."""
    bits_M = tl.load(bits_ptr + token_M, mask=real_M, other=0)
    base_M = tl.load(base_ptr + token_M, mask=real_M, other=0).to(tl.int32)
    nodes_M = popcount(bits_M)
    position_M = base_M + nodes_M - 1
    if WINDOW:
        for i in range(LAST_NODE):  # the lowest bit that is left
            bits_M = tl.where(nodes_M - window > i, bits_M & (bits_M - 1), bits_M)
    return bits_M.to(tl.uint64, bitcast=True), base_M, position_M


@triton.jit
def seen_of_tile(bits_M, base_M, position_M, start, window, WINDOW: tl.constexpr):
    """Return the keys of a tile that each query sees, as bits (unsigned) of which bit n is key start + n. The tile has
    64 keys at most."""
    ahead_M = base_M - start  # so many of the tile's keys lie before the base
    context_M = _lowest_bits(ahead_M)
    if WINDOW:
        context_M = context_M & ~_lowest_bits(position_M - window + 1 - start)
    into_M, beyond_M = _shift(ahead_M), _shift(-ahead_M)
    nodes_M = tl.where(ahead_M > 0, bits_M << into_M, bits_M >> beyond_M)
    return context_M | tl.where((ahead_M <= LAST_NODE) & (ahead_M >= -LAST_NODE), nodes_M, 0)


@triton.jit
def _shift(count):
    return tl.minimum(tl.maximum(count, 0), LAST_NODE).to(tl.uint64)


@triton.jit
def _lowest_bits(count):
    """Return as many bits, the lowest ones; none below zero and all from 64 on."""
    bits = (tl.full((1,), 1, tl.uint64) << _shift(count)) - 1
    return tl.where(count > LAST_NODE, ~(bits & 0), bits)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def in_bits(bits, n):
    """Return True where bit n is set."""
    return (bits >> n.to(tl.uint64)) & 1 != 0


@triton.jit
def behind_in_tree(key, bits, base, position, ALIBI: tl.constexpr):
    """Return the position of keys that queries with these bits see, less the queries' own."""
    if ALIBI:
        nodes = popcount(bits >> _shift(key - base))  # the key's and those below it
        return tl.where(key < base, key - position, 1 - nodes)
    else:
        return key - position
