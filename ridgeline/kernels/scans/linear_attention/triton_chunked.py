"""Linear attention with all chunks side by side: the forward kernels of training.

With the running sums c_i of a chunk's decays, one for each channel, and the state S before the chunk:

    o_i = (q_i exp(c_i))ᵀ S + Σ_j A_ij v_j,    S ← exp(c) S + Σ_j (k_j exp(c - c_j)) ⊗ v_j

and A_ij = Σ q_i k_j exp(c_i - c_j) for j <= i. Only the states follow from one another, and a tile of a state follows
from nothing but itself, since a decay belongs to one key channel. So one kernel walks through the chunks with tiles of
states and stores the state before each chunk. All other kernels take every chunk at once (Yang et al.,
arXiv 2312.06635, section 4).

Legend: that of op.py, and
    C  chunks
    L  tokens of a chunk
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.metadata import ROW_TYPES

CHUNK = 64
PART = 16  # tokens that are compared one by one
WIDE = 64  # channels and columns of a program's tile
NARROW = 32  # channels of a tile of PART x PART tokens


@triton.jit
def load_fades(
    fade_ptr, token, head, key, mask, fade_token, fade_head,
    EACH: tl.constexpr,
):  # fmt: skip
    """Load the logarithms of the decays of these tokens and channels, [tokens, channels], and 0 where there is none.
    EACH: channels have decays of their own."""
    channel = key if EACH else key * 0
    at = token[:, None] * fade_token + head * fade_head + channel[None, :]
    return tl.load(fade_ptr + at, mask=mask, other=0).to(tl.float32)


@triton.jit
def _linear_attention_fade(
    q_ptr, k_ptr, fade_ptr, asked_ptr, told_ptr, leaves_ptr, first_ptr, length_ptr,
    q_token, k_token, fade_token, fade_head, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Fade BK channels of a chunk's queries and keys.

    asked_ptr, told_ptr: q exp(c_i) with the scale, and k exp(c - c_i), [T, H, K]. leaves_ptr: exp(c), float32
    [C, H, K].
    """
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    i, key = tl.arange(0, L), tile * BK + tl.arange(0, BK)
    token = tl.load(first_ptr + chunk).to(tl.int64) + i
    in_k = (key < K)[None, :]
    live = (i < length)[:, None] & in_k
    at = (token[:, None] * H + head) * K + key[None, :]
    fade = load_fades(fade_ptr, token, head, key, live, fade_token, fade_head, EACH)
    behind = (i + 1 < length)[:, None] & in_k
    later = load_fades(fade_ptr, token + 1, head, key, behind, fade_token, fade_head, EACH)
    q = tl.load(q_ptr + token[:, None] * q_token + head * K + key[None, :], mask=live, other=0).to(tl.float32)
    k = tl.load(k_ptr + token[:, None] * k_token + head * K + key[None, :], mask=live, other=0).to(tl.float32)
    asked = q * tl.exp(tl.cumsum(fade, 0)) * scale
    told = k * tl.exp(tl.cumsum(later, 0, reverse=True))
    tl.store(asked_ptr + at, asked.to(asked_ptr.dtype.element_ty), mask=live)
    tl.store(told_ptr + at, told.to(told_ptr.dtype.element_ty), mask=live)
    leaves_at = leaves_ptr + (chunk.to(tl.int64) * H + head) * K + key
    tl.store(leaves_at, tl.exp(tl.sum(fade, 0)), mask=key < K)


@triton.jit
def _linear_attention_within(
    q_ptr, k_ptr, fade_ptr, within_ptr, first_ptr, length_ptr,
    q_token, k_token, fade_token, fade_head, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, PART: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Compute PART rows of A with the scale, [C, H, L, L]. Its upper triangle is zeros.

    Keys of tokens before these rows are faded to the beginning of the rows, and queries from there on, so no factor is
    above one. The rows' own tokens are compared one by one.
    """
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, begin = tl.load(length_ptr + chunk), part * PART
    if begin >= length:
        return
    i, p = tl.arange(0, L), tl.arange(0, PART)
    first = tl.load(first_ptr + chunk).to(tl.int64)
    token_i, token_p = first + i, first + begin + p
    far = tl.zeros((PART, L), tl.float32)
    near = tl.zeros((PART, PART), tl.float32)
    for tile in range(0, K, BK):
        key = tile + tl.arange(0, BK)
        in_k = (key < K)[None, :]
        live = (begin + p < length)[:, None] & in_k
        q = tl.load(q_ptr + token_p[:, None] * q_token + head * K + key[None, :], mask=live, other=0)
        k = tl.load(k_ptr + token_p[:, None] * k_token + head * K + key[None, :], mask=live, other=0)
        dtype: tl.constexpr = k.dtype
        q, k = q.to(tl.float32), k.to(tl.float32)
        since = tl.cumsum(load_fades(fade_ptr, token_p, head, key, live, fade_token, fade_head, EACH), 0)
        before = (i < begin)[:, None] & in_k
        k_far = tl.load(k_ptr + token_i[:, None] * k_token + head * K + key[None, :], mask=before, other=0)
        behind = (i + 1 < begin)[:, None] & in_k
        later = load_fades(fade_ptr, token_i + 1, head, key, behind, fade_token, fade_head, EACH)
        k_far = k_far.to(tl.float32) * tl.exp(tl.cumsum(later, 0, reverse=True))
        far = tl.dot((q * tl.exp(since)).to(dtype), tl.trans(k_far.to(dtype)), far, input_precision="ieee")
        met = tl.exp(tl.minimum(since[:, None, :] - since[None, :, :], 0))
        near += tl.sum(q[:, None, :] * k[None, :, :] * met, 2)
    square = within_ptr + (chunk.to(tl.int64) * H + head) * L * L + (begin + p)[:, None] * L
    mine = (i >= begin) & (i < begin + PART)
    tl.store(
        square + i[None, :], (far * scale).to(within_ptr.dtype.element_ty), mask=~mine[None, :] & (p >= 0)[:, None]
    )
    near = tl.where(p[:, None] >= p[None, :], near * scale, 0)
    tl.store(square + begin + p[None, :], near.to(within_ptr.dtype.element_ty))


@triton.jit
def _walk(
    state, x_ptr, y_ptr, leaves_ptr, before_ptr, first, end, chunk, head, key, value, y_token,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Return a tile of the state after S ← exp(c) S + Σ_j x_j ⊗ y_j for each chunk of tokens from `first` to `end`,
    and store what it is before each. BACK: the last chunk comes first."""
    i = tl.arange(0, L)
    in_k, in_v = key < K, value < V
    number = tl.cdiv(end - first, L)
    for n in tl.range(0, number, num_stages=STAGES):
        at = number - 1 - n if BACK else n
        token = tl.cast(first + at * L, tl.int64) + i
        live = (token < end)[:, None]
        x_at = (token[:, None] * H + head) * K + key[None, :]
        x = tl.load(x_ptr + x_at, mask=live & in_k[None, :], other=0)
        y_at = token[:, None] * y_token + head * V + value[None, :]
        y = tl.load(y_ptr + y_at, mask=live & in_v[None, :], other=0)
        of_chunk = (chunk + at).to(tl.int64) * H + head
        leaves = tl.load(leaves_ptr + of_chunk * K + key, mask=in_k, other=0)
        before_at = before_ptr + (of_chunk * K + key[:, None]) * V + value[None, :]
        tl.store(before_at, state.to(before_ptr.dtype.element_ty), mask=in_k[:, None] & in_v[None, :])
        state = tl.dot(tl.trans(x), y, state * leaves[:, None], input_precision="ieee")
    return state


@triton.jit(do_not_specialize=["rows"])
def _linear_attention_states(
    told_ptr, v_ptr, leaves_ptr, before_ptr, states_ptr, asked_ptr, do_ptr, after_ptr, d_final_ptr, d_initial_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr, of_ptr,
    v_token, do_token, states_block, rows,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    STAGES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Walk through a row's chunks with a tile of a head's state, and store the state before each, [C, H, K, V].

    BACK: the rows' states are not replaced, and as many programs more walk backwards, from d_final [R, H, K, V], zeros
    where that is None: they store the gradients of the states after each chunk, and in d_initial those of the states
    before the rows, float32 [R, H, K, V].
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (V + BV - 1) // BV
    key, value = (tile // tiles) * BK + tl.arange(0, BK), (tile % tiles) * BV + tl.arange(0, BV)
    inside = (key < K)[:, None] & (value < V)[None, :]
    cell = head * K * V + key[:, None] * V + value[None, :]
    back = row >= rows
    row = row % rows
    start, end, chunk = tl.load(start_ptr + row), tl.load(start_ptr + row + 1), tl.load(of_ptr + row)
    columns = V * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a state there is
    held = inside & (value < columns)[None, :]
    if back:
        if BACK:
            of_row = row.to(tl.int64) * H * K * V + cell
            state = tl.zeros((BK, BV), tl.float32)
            if d_final_ptr is not None:
                state = tl.load(d_final_ptr + of_row, mask=inside, other=0)
            state = _walk(
                state, asked_ptr, do_ptr, leaves_ptr, after_ptr, start, end, chunk, head, key, value, do_token,
                H, K, V, L, STAGES, True,
            )  # fmt: skip
            tl.store(d_initial_ptr + of_row, tl.where(held, state, 0), mask=inside)
    else:
        block = tl.load(reads_ptr + row)
        state = tl.load(states_ptr + block * states_block + cell, mask=held, other=0)
        middle = start
        if not BACK:
            middle = start + tl.load(marks_ptr + row)
            if middle > start:
                state = _walk(
                    state, told_ptr, v_ptr, leaves_ptr, before_ptr, start, middle, chunk, head, key, value, v_token,
                    H, K, V, L, STAGES, False,
                )  # fmt: skip
                block = tl.load(marked_ptr + row)
                tl.store(states_ptr + block * states_block + cell, state, mask=inside)
                chunk += tl.cdiv(middle - start, L)
        state = _walk(
            state, told_ptr, v_ptr, leaves_ptr, before_ptr, middle, end, chunk, head, key, value, v_token,
            H, K, V, L, STAGES, False,
        )  # fmt: skip
        if not BACK:
            tl.store(states_ptr + tl.load(writes_ptr + row) * states_block + cell, state, mask=inside)


@triton.jit
def _linear_attention_outputs(
    asked_ptr, v_ptr, within_ptr, before_ptr, o_ptr, first_ptr, length_ptr, v_token,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Compute BV columns of a chunk's outputs, from the state before it and its own tokens."""
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + chunk)
    if length == 0:
        return
    i, value = tl.arange(0, L), tile * BV + tl.arange(0, BV)
    token = tl.load(first_ptr + chunk).to(tl.int64) + i[:, None]
    live, in_v = (i < length)[:, None], (value < V)[None, :]
    of_chunk = chunk.to(tl.int64) * H + head
    within = tl.load(within_ptr + of_chunk * L * L + i[:, None] * L + i[None, :], mask=live, other=0)
    v = tl.load(v_ptr + token * v_token + head * V + value[None, :], mask=live & in_v, other=0)
    o = tl.dot(within, v, input_precision="ieee")
    for tile_k in range(0, K, BK):
        key = tile_k + tl.arange(0, BK)
        asked = tl.load(asked_ptr + (token * H + head) * K + key[None, :], mask=live & (key < K)[None, :], other=0)
        state_at = before_ptr + (of_chunk * K + key[:, None]) * V + value[None, :]
        state = tl.load(state_at, mask=(key < K)[:, None] & in_v, other=0)
        o = tl.dot(asked, state, o, input_precision="ieee")
    tl.store(o_ptr + (token * H + head) * V + value[None, :], o.to(o_ptr.dtype.element_ty), mask=live & in_v)


SHAPE = {"H": 4, "K": 256, "L": CHUNK}
PLACES = {"first_ptr": "*i32", "length_ptr": "*i32"}
FADES = {"fade_ptr": "*fp32"} | dict.fromkeys(("q_token", "k_token", "fade_token", "fade_head"), "i32:16")


def half(*names: str) -> dict[str, str]:
    """Return the types of pointers to activations."""
    return dict.fromkeys((f"{name}_ptr" for name in names), "*bf16")


def _aot_states(backward: bool) -> AotKernel:
    types = half("told", "v", "before") | dict.fromkeys(("leaves_ptr", "states_ptr"), "*fp32")
    types |= ROW_TYPES | {"of_ptr": "*i32"}
    types |= dict.fromkeys(("v_token", "do_token", "states_block"), "i32:16") | {"rows": "i32"}
    constants: dict[str, int | None] = {**SHAPE, "V": 512, "BK": WIDE, "BV": WIDE, "STAGES": 3, "BACK": backward}
    if backward:
        types |= half("asked", "do", "after") | {"d_initial_ptr": "*fp32"}
        constants |= {"d_final_ptr": None}
    else:
        constants |= dict.fromkeys(("asked_ptr", "do_ptr", "after_ptr", "d_final_ptr", "d_initial_ptr"))
    return AotKernel(_linear_attention_states, types, constants, hot=True, tensor_cores="MMA", archs=ONE_OF_EACH)


AOT = (
    AotKernel(
        _linear_attention_fade,
        half("q", "k", "asked", "told") | FADES | PLACES | {"leaves_ptr": "*fp32", "scale": "fp32"},
        {**SHAPE, "BK": WIDE, "EACH": True},
        hot=True,
        archs=ONE_OF_EACH,
    ),
    AotKernel(
        _linear_attention_within,
        half("q", "k", "within") | FADES | PLACES | {"scale": "fp32"},
        {**SHAPE, "BK": NARROW, "PART": PART, "EACH": True},
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
    ),
    _aot_states(True),
    _aot_states(False),
    AotKernel(
        _linear_attention_outputs,
        half("asked", "v", "within", "before", "o") | PLACES | {"v_token": "i32:16"},
        {**SHAPE, "V": 512, "BK": WIDE, "BV": WIDE},
        hot=True,
        tensor_cores="MMA",
        archs=ONE_OF_EACH,
    ),
)
