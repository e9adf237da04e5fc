"""From logits to tokens: biases, penalties, temperature, filters, one counter-based draw; and token masks before it.

The order is: guidance (`scoring.guide`) and masks (`mask_logits`), which are ops of their own; then bias, min_tokens
and penalties. Then greedy rows take the largest logit. The other rows divide by the temperature, filter by top-k,
top-p, min-p and typical-p (transformers' order), and draw by Gumbel-max. Everything that a request asked for lies in
tables indexed by slot, so the segment has the same shape whatever the batch wants.

Legend:
    S  slots
    R  rows
    V  vocabulary
    E  stop ids of a slot
    B  biased ids of a slot
    U  masked rows
    W  words of 32 bits
    O  octets (bytes) of a row's bits
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ridgeline.kernels.base.limits import MAX_LOGIT_BIAS, MAX_STOP_IDS
from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.philox import gumbel
from ridgeline.kernels.sampling.scoring import score


@dataclass(frozen=True, kw_only=True)
class SamplingTables:
    """The sampling parameters of all slots, one row per slot. Unused ids are -1. output_count and prompt_seen are kept
    for penalties only."""

    temperature_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    typical_p_S: Tensor
    repetition_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    top_k_S: Tensor
    seed_S: Tensor
    min_len_S: Tensor
    stop_ids_SE: Tensor
    bias_ids_SB: Tensor
    bias_SB: Tensor
    output_count_SV: Tensor
    prompt_seen_SV: Tensor

    @staticmethod
    def empty(num_slots: int, vocab_size: int, device: torch.device) -> SamplingTables:
        """Return tables in which every slot is greedy and unbiased."""
        widths = {"E": MAX_STOP_IDS, "B": MAX_LOGIT_BIAS, "V": vocab_size}
        integer = {"top_k_S": 0, "seed_S": 0, "min_len_S": 0, "stop_ids_SE": -1, "bias_ids_SB": -1}
        tables = {}
        for field in fields(SamplingTables):
            _, _, axes = field.name.rpartition("_")
            shape = (num_slots, *(widths[axis] for axis in axes[1:]))
            dtype = torch.int64 if field.name in integer else torch.float32
            tables[field.name] = torch.full(shape, integer.get(field.name, 0), dtype=dtype, device=device)
        tables["output_count_SV"] = tables["output_count_SV"].to(torch.int32)
        tables["prompt_seen_SV"] = tables["prompt_seen_SV"].to(torch.bool)
        tables["repetition_S"].fill_(1)
        tables["top_p_S"].fill_(1)
        tables["typical_p_S"].fill_(1)
        return SamplingTables(**tables)


def sample_reference(
    logits_RV: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
) -> Tensor:
    """Draw one token per row: int64 [R], -1 where all logits are NaN.

    logits_RV: any float dtype; they are left as they are.
    position_R: the index of the token to draw.
    features: what the rows need at most. The reference ignores it and looks at every row's own numbers.
    """
    tokens = []
    for n, slot in enumerate(slots_R.tolist()):
        logits_V = logits_RV[n].double()
        if logits_V.isnan().all():
            tokens.append(-1)
            continue
        for token, bias in zip(tables.bias_ids_SB[slot].tolist(), tables.bias_SB[slot].tolist(), strict=True):
            if token >= 0:
                logits_V[token] += bias
        if position_R[n] < tables.min_len_S[slot]:
            logits_V[[t for t in tables.stop_ids_SE[slot].tolist() if t >= 0]] = -torch.inf
        _penalize(logits_V, tables, slot)
        temperature = float(tables.temperature_S[slot])
        if temperature == 0:
            tokens.append(int(logits_V.argmax()))
            continue
        logits_V = logits_V / temperature
        kept_V = _filter(logits_V, int(tables.top_k_S[slot]), float(tables.top_p_S[slot]), float(tables.min_p_S[slot]))
        kept_V &= _typical(logits_V.masked_fill(~kept_V, -torch.inf), float(tables.typical_p_S[slot]))
        noise_V = gumbel(tables.seed_S[slot : slot + 1], position_R[n : n + 1], len(logits_V))[0]
        tokens.append(int((logits_V + noise_V).masked_fill(~kept_V, -torch.inf).argmax()))
    return torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device)


def _penalize(logits_V: Tensor, tables: SamplingTables, slot: int) -> None:
    """Apply the repetition penalty (CTRL, arXiv 1909.05858), then OpenAI's frequency and presence penalties."""
    count_V = tables.output_count_SV[slot]
    seen_V = (count_V > 0) | tables.prompt_seen_SV[slot]
    repetition = float(tables.repetition_S[slot])
    logits_V[seen_V] = torch.where(logits_V[seen_V] > 0, logits_V[seen_V] / repetition, logits_V[seen_V] * repetition)
    logits_V -= float(tables.frequency_S[slot]) * count_V
    logits_V -= float(tables.presence_S[slot]) * (count_V > 0)


def _filter(logits_V: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return True for each token that stays: of the top k, the fewest that reach top_p; and of these the ones at least
    min_p times as likely as the likeliest.

    Ties go to the smaller token id. The likeliest token always stays.
    """
    order = logits_V.sort(descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    probability = logits_V[order].softmax(0)
    before = probability.cumsum(0) - probability
    stays = ((before < top_p) | (top_p >= 1)) & (probability >= min_p * probability[0])
    stays[0] = True
    kept_V = torch.zeros_like(logits_V, dtype=torch.bool)
    kept_V[order[stays]] = True
    return kept_V


def _typical(logits_V: Tensor, typical_p: float) -> Tensor:
    """Return True for each token that locally typical sampling keeps (Meister et al., arXiv 2202.00666). It keeps the
    fewest tokens whose information is nearest to the entropy and that together hold a probability of typical_p, and all
    that tie with the last of them."""
    if typical_p >= 1:
        return torch.ones_like(logits_V, dtype=torch.bool)
    logprob_V = logits_V.log_softmax(0)
    entropy = -(logprob_V.exp() * logprob_V).nansum()
    distance_V = (-logprob_V - entropy).abs()
    nearest, order = distance_V.sort(stable=True)
    enough = (logprob_V.exp()[order].cumsum(0) < typical_p).sum().clamp(max=len(order) - 1)  # all may sum to less
    return distance_V <= nearest[enough]


def mask_reference(logits_RV: Tensor, bits_UW: Tensor, row_U: Tensor) -> None:
    """Forbid tokens in place: a logit of row row_U[u] becomes -inf wherever bits_UW[u] has no bit. NaN stays NaN, so a
    row of nothing else can still be recognized.

    bits_UW: int32; token v is bit v % 32 of word v // 32.
    row_U: int32, no row twice.
    """
    vocab, device = logits_RV.shape[1], logits_RV.device
    # The bits, and the bounds of eight logits, for each of the n values that a byte can have
    is_set_n8 = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    bound_n8 = torch.where(is_set_n8 == 1, torch.inf, -torch.inf).to(logits_RV.dtype)
    bound_O8 = torch.empty(4 * bits_UW.shape[1], 8, dtype=logits_RV.dtype, device=device)
    for bits_W, row in zip(bits_UW, row_U.tolist(), strict=True):
        torch.index_select(bound_n8, 0, bits_W.view(torch.uint8).int(), out=bound_O8)
        torch.minimum(logits_RV[row], bound_O8.view(-1)[:vocab], out=logits_RV[row])


SAMPLE = Op(
    "sample",
    sample_reference,
    (
        Implementation("triton", "ridgeline.kernels.sampling.triton:sample", on_gpu),
        Implementation("torch", "ridgeline.kernels.sampling.torch_ops:sample"),
        Implementation("batch_invariant", "ridgeline.kernels.sampling.triton:sample_batch_invariant", on_gpu),
    ),
)

MASK_LOGITS = Op(
    "mask_logits",
    mask_reference,
    (Implementation("triton", "ridgeline.kernels.sampling.triton_mask:mask", on_gpu),),
)

SCORE_TOKENS = Op(
    "score_tokens",
    score,
    (
        Implementation("triton", "ridgeline.kernels.sampling.triton_logprobs:score", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.sampling.triton_logprobs:score_batch_invariant", on_gpu),
    ),
)
