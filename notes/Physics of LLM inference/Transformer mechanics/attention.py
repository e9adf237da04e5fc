"""Attention from its definition to the tiles of FlashAttention, in NumPy. Read it from top to bottom.

    1. attention          the definition: all scores, their softmax, a mean of values
    2. heads              many heads (MHA), one head of keys for all (MQA), one for each group (GQA)
    3. latents            keys and values as products of a short latent vector (MLA), in both orders of multiplication
    4. online_softmax     a softmax in one pass, with a maximum that may still grow
    5. flash_forward      1 by tiles: no score leaves the chip (FlashAttention-2's order, arXiv 2307.08691)
    6. flash_backward     its gradients, from the output and one number a query
    7. Traffic            the numbers that 1, 5 and 6 move between memory and chip, counted while they run

`python attention.py` prints 7 for growing texts. Everything is in float64, and slow: it is here to be read and to be
compared with. `ridgeline/kernels/attention/triton_sdpa.py` is 5 and 6 on a GPU.

Legend, for the ends of names:
    Q  queries        H  heads             D  channels of a query and a key
    K  keys           G  heads of keys     V  channels of a value
    R  queries of a tile                   L  channels of a latent
    C  keys of a tile                      P  channels that are rotated
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


# ---- 1. the definition ----------------------------------------------------------------------------------------------


def seen(queries: int, keys: int, causal: bool) -> NDArray[np.bool_]:
    """Return the keys that each query sees, [Q, K]. Queries are the last of the keys' positions."""
    at_Q1, at_1K = np.arange(keys - queries, keys)[:, None], np.arange(keys)[None, :]
    return at_1K <= at_Q1 if causal else np.ones((queries, keys), bool)


def softmax(scores_QK: Array) -> Array:
    """Return weights that are above 0 and sum to 1. The largest score is subtracted first, so no exponential overflows;
    it cancels. A row of -inf alone gives zeros."""
    top_Q1 = scores_QK.max(-1, keepdims=True)
    powers_QK = np.exp(scores_QK - np.where(np.isneginf(top_Q1), 0.0, top_Q1))
    total_Q1 = powers_QK.sum(-1, keepdims=True)
    return powers_QK / np.where(total_Q1 == 0, 1.0, total_Q1)


def attention(
    q_QD: Array, k_KD: Array, v_KV: Array, *, causal: bool = True, scale: float | None = None, io: Traffic | None = None
) -> Array:
    """Return the attention of one head, [Q, V]: for each query the mean of the values, weighted by softmax(q · k).

    Without the scale, which is 1/√D by default, scores of D independent channels would have a variance of D, and the
    softmax would choose one key where it should weigh many.
    """
    io = io or Traffic()
    scale = scale if scale is not None else q_QD.shape[1] ** -0.5
    io.read(q_QD, k_KD)
    scores_QK = io.written(q_QD @ k_KD.T * scale)
    masked_QK = np.where(seen(*scores_QK.shape, causal), io.read(scores_QK), -np.inf)
    weights_QK = io.written(softmax(masked_QK))
    return io.written(io.read(weights_QK) @ io.read(v_KV))


# ---- 2. heads -------------------------------------------------------------------------------------------------------


def heads(q_HQD: Array, k_GKD: Array, v_GKV: Array, *, causal: bool = True, scale: float | None = None) -> Array:
    """Return the attention of each head, [H, Q, V]. H / G neighbouring heads read the same keys and values.

    G = H is multi-head attention, G = 1 multi-query attention, and all between is grouped. The cache holds G heads, so
    a token costs G · (D + V) numbers. Raises ValueError if G does not divide H.
    """
    each, rest = divmod(len(q_HQD), len(k_GKD))
    if rest:
        raise ValueError(f"{len(k_GKD)} heads of keys do not divide {len(q_HQD)} heads of queries.")
    return np.stack(
        [attention(q, k_GKD[h // each], v_GKV[h // each], causal=causal, scale=scale) for h, q in enumerate(q_HQD)]
    )


# ---- 3. latents -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latent:
    """The matrices of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values of all
    heads are products of one latent vector. Beside it a token has one rotated key for all heads.

    up_k_HDL, up_v_HVL: from a latent to each head's key and value.
    """

    up_k_HDL: Array
    up_v_HVL: Array

    def expanded(self, q_HQD: Array, turned_HQP: Array, latent_KL: Array, turned_KP: Array) -> Array:
        """Return the attention, [H, Q, V], with every head's keys and values made first: H · (D + P + V) numbers a
        token. Good for prompts, where each key meets many queries."""
        scale = (q_HQD.shape[-1] + turned_HQP.shape[-1]) ** -0.5
        out = []
        for q_QD, turned_QP, up_k_DL, up_v_VL in zip(q_HQD, turned_HQP, self.up_k_HDL, self.up_v_HVL, strict=True):
            k_KD, v_KV = latent_KL @ up_k_DL.T, latent_KL @ up_v_VL.T
            both_q, both_k = np.concatenate([q_QD, turned_QP], 1), np.concatenate([k_KD, turned_KP], 1)
            out.append(attention(both_q, both_k, v_KV, scale=scale))
        return np.stack(out)

    def absorbed(self, q_HQD: Array, turned_HQP: Array, latent_KL: Array, turned_KP: Array) -> Array:
        """Return the same from the latents themselves: L + P numbers a token, which all heads read.

        q · (U c) = (Uᵀ q) · c, so the matrix moves to the query's side, and the one of values behind the mean. Good for
        single queries, where reading keys is what takes time: this is multi-query attention with wide heads.
        """
        scale = (q_HQD.shape[-1] + turned_HQP.shape[-1]) ** -0.5
        out, k_KX = [], np.concatenate([latent_KL, turned_KP], 1)
        for q_QD, turned_QP, up_k_DL, up_v_VL in zip(q_HQD, turned_HQP, self.up_k_HDL, self.up_v_HVL, strict=True):
            mean_QL = attention(np.concatenate([q_QD @ up_k_DL, turned_QP], 1), k_KX, latent_KL, scale=scale)
            out.append(mean_QL @ up_v_VL.T)
        return np.stack(out)


# ---- 4. a softmax in one pass ---------------------------------------------------------------------------------------


def online_softmax(scores_K: Array, values_KV: Array, tile: int) -> Array:
    """Return softmax(scores) @ values, [V], from tiles that pass by once (Milakov and Gimelshein, arXiv 1805.02867).

    What was summed with an old maximum is worth exp(old − new) of it under the new one. That factor mends the sum of
    powers and the sum of values alike, so neither the final maximum nor the final sum has to be known beforehand.
    """
    top, total, mean_V = -math.inf, 0.0, np.zeros(values_KV.shape[1])
    for begin in range(0, len(scores_K), tile):
        scores_C, values_CV = scores_K[begin : begin + tile], values_KV[begin : begin + tile]
        new = max(top, float(scores_C.max()))
        if new == -math.inf:
            continue
        kept, powers_C = math.exp(top - new), np.exp(scores_C - new)
        total = total * kept + float(powers_C.sum())
        mean_V = mean_V * kept + powers_C @ values_CV
        top = new
    return mean_V / total if total else mean_V


# ---- 5. FlashAttention ----------------------------------------------------------------------------------------------


def flash_forward(
    q_QD: Array, k_KD: Array, v_KV: Array, rows: int, columns: int, *, causal: bool = True, scale: float | None = None,
    io: Traffic | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return (the output [Q, V], the logarithm of each query's sum of powers [Q]), by tiles of `rows` queries and
    `columns` keys.

    The outer loop goes over queries: a tile of them stays on the chip with its output, and keys and values pass by. On
    a GPU each tile of queries is a program of its own. Tiles of keys that no query of the tile sees are skipped.
    """
    io = io or Traffic()
    (queries, _), keys = q_QD.shape, len(k_KD)
    scale = scale if scale is not None else q_QD.shape[1] ** -0.5
    out_QV, log_Q = np.zeros((queries, v_KV.shape[1])), np.full(queries, -np.inf)
    sees_QK = seen(queries, keys, causal)
    for r in range(0, queries, rows):
        own = slice(r, r + rows)
        q_RD = io.read(q_QD[own])
        top_R, total_R = np.full(len(q_RD), -np.inf), np.zeros(len(q_RD))
        out_RV = np.zeros((len(q_RD), v_KV.shape[1]))
        for c in range(0, keys, columns):
            tile = slice(c, c + columns)
            if not sees_QK[own, tile].any():
                continue
            k_CD, v_CV = io.read(k_KD[tile]), io.read(v_KV[tile])
            scores_RC = np.where(sees_QK[own, tile], q_RD @ k_CD.T * scale, -np.inf)
            new_R = np.maximum(top_R, scores_RC.max(1))
            finite_R = np.where(np.isneginf(new_R), 0.0, new_R)
            kept_R, powers_RC = np.exp(top_R - finite_R), np.exp(scores_RC - finite_R[:, None])
            total_R = total_R * kept_R + powers_RC.sum(1)
            out_RV = out_RV * kept_R[:, None] + powers_RC @ v_CV
            top_R = new_R
        some_R = total_R > 0
        sum_R = np.where(some_R, total_R, 1.0)
        out_QV[own] = io.written(out_RV / sum_R[:, None])  # once at the end, as FlashAttention-2 does
        log_Q[own] = io.written(np.where(some_R, np.where(some_R, top_R, 0.0) + np.log(sum_R), -np.inf))
    return out_QV, log_Q


# ---- 6. its gradients -----------------------------------------------------------------------------------------------


def flash_backward(
    q_QD: Array, k_KD: Array, v_KV: Array, out_QV: Array, log_Q: Array, grad_QV: Array, rows: int, columns: int, *,
    causal: bool = True, scale: float | None = None, io: Traffic | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the gradients of q, k and v, from that of the output.

    Weights are computed again as exp(score − log): cheaper than to store and read them. With P the weights and dP = dO
    Vᵀ, the gradient of a softmax is dS = P ∘ (dP − Σ P ∘ dP), and that sum over keys is Σ dO ∘ O, a number a query. So
    a tile needs nothing of the other tiles.
    """
    io = io or Traffic()
    (queries, _), keys = q_QD.shape, len(k_KD)
    scale = scale if scale is not None else q_QD.shape[1] ** -0.5
    delta_Q = io.written((io.read(grad_QV) * io.read(out_QV)).sum(1))
    log_Q = np.where(np.isneginf(log_Q), np.inf, log_Q)  # a query that sees nothing weighs nothing
    dq_QD, dk_KD, dv_KV = np.zeros_like(q_QD), np.zeros_like(k_KD), np.zeros_like(v_KV)
    sees_QK = seen(queries, keys, causal)
    for c in range(0, keys, columns):
        tile = slice(c, c + columns)
        k_CD, v_CV = io.read(k_KD[tile]), io.read(v_KV[tile])
        dk_CD, dv_CV = np.zeros_like(k_CD), np.zeros_like(v_CV)
        for r in range(0, queries, rows):
            own = slice(r, r + rows)
            if not sees_QK[own, tile].any():
                continue
            q_RD, grad_RV = io.read(q_QD[own]), io.read(grad_QV[own])
            log_R, delta_R = io.read(log_Q[own]), io.read(delta_Q[own])
            scores_RC = np.where(sees_QK[own, tile], q_RD @ k_CD.T * scale, -np.inf)
            weights_RC = np.exp(scores_RC - log_R[:, None])
            dv_CV += weights_RC.T @ grad_RV
            slopes_RC = weights_RC * (grad_RV @ v_CV.T - delta_R[:, None]) * scale
            dk_CD += slopes_RC.T @ q_RD
            dq_QD[own] = io.written(io.read(dq_QD[own]) + slopes_RC @ k_CD)  # summed in memory, tile by tile
        dk_KD[tile], dv_KV[tile] = io.written(dk_CD), io.written(dv_CV)
    return dq_QD, dk_KD, dv_KV


# ---- 7. what moves --------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """The numbers that go from memory to the chip, and back."""

    reads: int = 0
    writes: int = 0

    def read(self, *arrays: Array) -> Array:
        """Count these as read, and return the first."""
        self.reads += sum(each.size for each in arrays)
        return arrays[0]

    def written(self, array: Array) -> Array:
        """Count this as written, and return it."""
        self.writes += array.size
        return array

    @property
    def moved(self) -> int:
        return self.reads + self.writes


def plain_traffic(queries: int, keys: int, size: int) -> int:
    """Return what `attention` moves for heads of so many channels: q, k, v and the output once, and the scores and the
    weights once in each direction. It grows with the square of the text."""
    return 2 * size * (queries + keys) + 4 * queries * keys


def flash_traffic(queries: int, keys: int, size: int, rows: int) -> int:
    """Return what `flash_forward` moves without a mask: keys and values once for each tile of queries, and a number a
    query for the backward pass. With M numbers on the chip a tile has about M / 4D rows, so this is 8 Q K D² / M
    (FlashAttention, arXiv 2205.14135, theorem 2)."""
    return 2 * size * queries + queries + 2 * size * keys * -(-queries // rows)


def main() -> None:
    draw, size, rows = np.random.default_rng(0), 64, 128
    print(f"numbers moved for one head of {size} channels, tiles of {rows} queries, without a mask")
    print(f"{'tokens':>8}{'plain':>14}{'flash':>14}{'plain / flash':>15}{'largest difference':>20}")
    for tokens in (256, 512, 1024, 2048):
        q, k, v = (draw.standard_normal((tokens, size)) for _ in range(3))
        plain, flash = Traffic(), Traffic()
        a = attention(q, k, v, causal=False, io=plain)
        b, _ = flash_forward(q, k, v, rows, rows, causal=False, io=flash)
        share = plain.moved / flash.moved
        print(f"{tokens:>8,}{plain.moved:>14,}{flash.moved:>14,}{share:>15.2f}{np.abs(a - b).max():>20.1e}")


if __name__ == "__main__":
    main()
