"""The choice of each token's experts, on a tile of tokens by experts in registers.

Scores become integers of the same order. The best of a row is then a largest integer and the smallest column that has
it, so equal scores fall to the first expert, and warps have instructions for both.

Legend:
    T  tokens of a tile
    E  experts, padded to a power of two
    G  groups, likewise
    K  experts of a token, likewise
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

NOBODY = tl.constexpr(-0x80000000)  # the key of what cannot be chosen (any more)
EXCLUDED = tl.constexpr(-0x7F800001)  # the key of minus infinity: an expert of a group that was not chosen
NORMALIZER = tl.constexpr(1e-20)  # that of op.py


@triton.jit
def _key(score):
    """Return int32 numbers in the order of the float32 scores."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """Return the float32 scores of keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_best(key, column, END: tl.constexpr):
    """Return the first column with the largest key of each row: [rows, 1]."""
    best = tl.max(key, 1)[:, None]
    return tl.min(tl.where(key == best, column, END), 1)[:, None]


@triton.jit
def _allowed(
    choice_TE, column_1E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr, EXPERTS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return True for each expert in the TOP_GROUPS best groups of SIZE experts. PAIR: a group's score is the sum of
    its two best, otherwise it is its best."""
    group_1E = column_1E // SIZE
    group_1G = tl.arange(0, PADDED)[None, :]
    score_TG = tl.full((choice_TE.shape[0], PADDED), float("-inf"), tl.float32)
    for group in range(GROUPS):
        inside_TE = tl.where(group_1E == group, choice_TE, float("-inf"))
        score_T1 = tl.max(inside_TE, 1)[:, None]
        if PAIR:
            first_T1 = tl.min(tl.where(inside_TE == score_T1, column_1E, EXPERTS), 1)[:, None]
            score_T1 += tl.max(tl.where(column_1E == first_T1, float("-inf"), inside_TE), 1)[:, None]
        score_TG = tl.where(group_1G == group, score_T1, score_TG)
    key_TG = tl.where(group_1G < GROUPS, _key(score_TG), NOBODY)
    allowed_TE = (choice_TE == choice_TE) & False
    for _ in range(TOP_GROUPS):
        best_T1 = _first_best(key_TG, group_1G, PADDED)
        key_TG = tl.where(group_1G == best_T1, NOBODY, key_TG)
        allowed_TE = allowed_TE | (group_1E == best_T1)
    return allowed_TE


@triton.jit
def choose_experts(
    logits_TE, bias_ptr, correction_ptr, expert_scale_ptr, scale,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, EXPERT_SCALE: tl.constexpr,
    NEARNESS: tl.constexpr,
):  # fmt: skip
    """Return (experts [T, K], weights [T, K], which experts were chosen [T, E]).

    logits: float32, without the router's bias. Columns from E on may hold anything.
    NEARNESS: that of the score "sparsemixer"; below 0: the score is another one.
    """
    column_1E = tl.arange(0, EXPERTS)[None, :]
    choice_1K = tl.arange(0, CHOICES)[None, :]
    real_1E = column_1E < E
    if BIAS:
        logits_TE += tl.load(bias_ptr + column_1E, mask=real_1E, other=0.0).to(tl.float32)
    if NEARNESS >= 0:
        score_TE = tl.where(real_1E, logits_TE, float("-inf"))
    elif SIGMOID:
        score_TE = tl.where(real_1E, 1 / (1 + tl.exp(-logits_TE)), 0.0)
    else:
        logits_TE = tl.where(real_1E, logits_TE, float("-inf"))
        raised_TE = tl.exp(logits_TE - tl.max(logits_TE, 1)[:, None])
        score_TE = raised_TE / tl.sum(raised_TE, 1)[:, None]
    nan_T1 = tl.max((score_TE != score_TE).to(tl.int32), 1)[:, None] > 0
    scored_TE = score_TE
    if CORRECTION:
        scored_TE += tl.load(correction_ptr + column_1E, mask=real_1E, other=0.0).to(tl.float32)
    key_TE = tl.where(real_1E, _key(scored_TE), NOBODY)
    if GROUPS > 1:
        scored_TE = tl.where(real_1E, scored_TE, float("-inf"))
        allowed_TE = _allowed(scored_TE, column_1E, GROUPS, TOP_GROUPS, PAIR, EXPERTS, E // GROUPS, GROUPS_PADDED)
        key_TE = tl.where(real_1E & (allowed_TE == 0), EXCLUDED, key_TE)
    expert_TK = tl.where(choice_1K < K, choice_1K, 0) + tl.zeros((logits_TE.shape[0], 1), tl.int32)
    weight_TK = tl.zeros((logits_TE.shape[0], CHOICES), tl.float32)
    nan_TE = nan_T1 & (column_1E < K)
    for k in range(K):
        key_T1 = tl.max(key_TE, 1)[:, None]
        best_T1 = tl.min(tl.where(key_TE == key_T1, column_1E, EXPERTS), 1)[:, None]
        if CORRECTION or GROUPS > 1:
            weight_T1 = tl.sum(tl.where(column_1E == best_T1, score_TE, 0.0), 1)[:, None]
        else:
            weight_T1 = _score(key_T1)
        if NEARNESS >= 0:
            far_TE = (weight_T1 - score_TE) / tl.maximum(tl.abs(score_TE), weight_T1) > NEARNESS
            near_TE = (key_TE != NOBODY) & (far_TE == 0)
            weight_T1 = 1 / tl.sum(tl.where(near_TE, tl.exp(score_TE - weight_T1), 0.0), 1)[:, None]
        expert_TK = tl.where((choice_1K == k) & (nan_T1 == 0), best_T1, expert_TK)
        weight_TK = tl.where(choice_1K == k, weight_T1, weight_TK)
        key_TE = tl.where(column_1E == best_T1, NOBODY, key_TE)
    if RENORMALIZE:
        weight_TK = weight_TK / (tl.sum(weight_TK, 1)[:, None] + NORMALIZER)
    weight_TK = weight_TK * scale
    if EXPERT_SCALE:
        weight_TK *= tl.load(expert_scale_ptr + expert_TK).to(tl.float32)
    chosen_TE = tl.where(nan_T1, nan_TE, real_1E & (key_TE == NOBODY))
    return expert_TK, tl.where(nan_T1, float("nan"), weight_TK), chosen_TE


@triton.jit
def store_choice(
    expert_ptr, weight_ptr, expert_TK, weight_TK, token_T1, kept_T1, alive_T1,
    E: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Store the experts and weights of a tile's pairs."""
    choice_1K = tl.arange(0, CHOICES)[None, :]
    pair_TK = token_T1 * K + choice_1K
    kept_TK = kept_T1 & (choice_1K < K)
    tl.store(expert_ptr + pair_TK, tl.where(alive_T1, expert_TK, E), mask=kept_TK)
    tl.store(weight_ptr + pair_TK, weight_TK, mask=kept_TK)


@triton.jit
def load_now(pointers, mask):
    """Load what is needed later, at once: a compiler may put off other loads until their values are needed."""
    return tl.load(pointers, mask=mask, other=0, volatile=True)


@triton.jit
def tokens_alive(live_ptr, token_T, tokens, LIVE: tl.constexpr):
    """Return True for each token that exists and belongs to a request."""
    alive_T = token_T < tokens
    if LIVE:
        alive_T = alive_T & (tl.load(live_ptr + token_T, mask=alive_T, other=0) != 0)
    return alive_T


@triton.jit
def bits_set(word):
    """Return the number of bits set in each int64 word, as int32."""
    word -= (word >> 1) & 0x5555555555555555
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def bit_of(number):
    """Return an int64 word in which one bit is set."""
    return tl.zeros_like(number).to(tl.int64) + 1 << number.to(tl.int64)


def aot_rules(experts: int, padded: int, used: int, *, grouped: bool) -> dict[str, Any]:
    """Return the constants of `choose_experts` for kernels that are compiled ahead."""
    return {
        "E": experts,
        "EXPERTS": padded,
        "K": used,
        "CHOICES": 8,
        "SIGMOID": grouped,
        "RENORMALIZE": True,
        "GROUPS": 8 if grouped else 1,
        "TOP_GROUPS": 4 if grouped else 1,
        "PAIR": grouped,
        "GROUPS_PADDED": 8 if grouped else 1,
        "BIAS": False,
        "CORRECTION": grouped,
        "EXPERT_SCALE": False,
        "NEARNESS": -1.0,
    }
