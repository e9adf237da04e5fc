"""The set of ops chosen for one platform, built once and handed to the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.kernels.attention.decode.op import DECODE_ATTENTION
from ridgeline.kernels.attention.expanded.op import EXPANDED_ATTENTION
from ridgeline.kernels.attention.latent.op import LATENT_ATTENTION, LATENT_KV, PARTIAL_LATENT_ATTENTION
from ridgeline.kernels.attention.packed.op import PACKED_ATTENTION
from ridgeline.kernels.attention.paged.op import ATTENTION_SCHEDULE, PAGED_ATTENTION
from ridgeline.kernels.attention.paged.partial import MERGE_ATTENTION, PARTIAL_ATTENTION
from ridgeline.kernels.attention.sparse.op import CHOICE_BITS, INDEX_KEYS, INDEX_TOPK, SPARSE_ATTENTION
from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.fixed_tiles import FIXED_TILES
from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline.kernels.base.op import Op, Overrides, Platform, on_gpu
from ridgeline.kernels.gemm.codes.op import CODED_LINEAR, CODED_NORM_LINEAR
from ridgeline.kernels.gemm.experts.op import GROUPED_DOWN, GROUPED_GATE_UP
from ridgeline.kernels.gemm.fp8.op import FP8_LINEAR, FP8_NORM_LINEAR
from ridgeline.kernels.gemm.heads.op import HEAD_LINEAR
from ridgeline.kernels.gemm.int8.op import INT8_LINEAR, W8A8_LINEAR
from ridgeline.kernels.gemm.lora.op import BY_ADAPTER, LORA
from ridgeline.kernels.gemm.plain.op import LINEAR, NORM_LINEAR
from ridgeline.kernels.gemm.route.op import ORDER_PAIRS, ROUTE, ROUTE_TO_SOME
from ridgeline.kernels.pictures.patches.op import PATCHES
from ridgeline.kernels.sampling.noised import NOISED
from ridgeline.kernels.sampling.op import MASK_LOGITS, SAMPLE, SCORE_TOKENS
from ridgeline.kernels.sampling.parts import BEST_OF_PARTS, DRAW_PART
from ridgeline.kernels.scans.causal_conv.op import CAUSAL_CONV
from ridgeline.kernels.scans.gated_delta.op import DELTA_ATTENTION, GATED_DELTA
from ridgeline.kernels.scans.linear_attention.op import LINEAR_ATTENTION
from ridgeline.kernels.scans.selective_scan.op import SELECTIVE_SCAN
from ridgeline.kernels.scans.ssd.op import SSD
from ridgeline.kernels.scans.wkv.op import WKV
from ridgeline.kernels.small.activation.op import ACTIVATION, GATED_ACTIVATION
from ridgeline.kernels.small.embedding.op import EMBEDDING, EMBEDDING_PART
from ridgeline.kernels.small.gated_norm.op import GATED_NORM
from ridgeline.kernels.small.log_mel.op import LOG_MEL
from ridgeline.kernels.small.norm.op import LAYER_NORM, RMS_NORM
from ridgeline.kernels.small.output_gate.op import OUTPUT_GATE
from ridgeline.kernels.small.rotary.op import ROPE, ROPE_KV
from ridgeline.kernels.small.token_gate.op import TOKEN_GATE
from ridgeline.kernels.step.compact import STEP_COMPACT
from ridgeline.kernels.step.keep import STEP_KEEP
from ridgeline.kernels.step.lookup.op import LOOKUP_DRAFTS
from ridgeline.kernels.step.lookup.recent import RECENT_DRAFTS
from ridgeline.kernels.step.op import STEP_ADVANCE, STEP_INPUTS, STEP_METADATA, STEP_POST
from ridgeline.kernels.step.verify import STEP_VERIFY
from ridgeline.kernels.step.wait import STEP_WAIT


class Ops:
    """The chosen function of every op. Raises InvalidConfig for names that do not exist.

    overrides: op name → implementation name ("reference" always exists). An op with a norm follows that without.
    chosen: op name → the name of the implementation in use.
    deterministic: no result for a token depends on the tokens beside it, so neither may the ops that compute it.
    """

    embedding = EMBEDDING
    embedding_part = EMBEDDING_PART
    linear = LINEAR
    norm_linear = NORM_LINEAR
    by_adapter = BY_ADAPTER
    lora = LORA
    int8_linear = INT8_LINEAR
    w8a8_linear = W8A8_LINEAR
    fp8_linear = FP8_LINEAR
    fp8_norm_linear = FP8_NORM_LINEAR
    coded_linear = CODED_LINEAR
    coded_norm_linear = CODED_NORM_LINEAR
    route = ROUTE
    route_to_some = ROUTE_TO_SOME
    order_pairs = ORDER_PAIRS
    grouped_gate_up = GROUPED_GATE_UP
    grouped_down = GROUPED_DOWN
    rms_norm = RMS_NORM
    layer_norm = LAYER_NORM
    rope = ROPE
    rope_kv = ROPE_KV
    gated_activation = GATED_ACTIVATION
    activation = ACTIVATION
    attention_schedule = ATTENTION_SCHEDULE
    paged_attention = PAGED_ATTENTION
    packed_attention = PACKED_ATTENTION
    partial_attention = PARTIAL_ATTENTION
    partial_latent_attention = PARTIAL_LATENT_ATTENTION
    merge_attention = MERGE_ATTENTION
    decode_attention = DECODE_ATTENTION
    latent_kv = LATENT_KV
    head_linear = HEAD_LINEAR
    latent_attention = LATENT_ATTENTION
    expanded_attention = EXPANDED_ATTENTION
    index_keys = INDEX_KEYS
    index_topk = INDEX_TOPK
    choice_bits = CHOICE_BITS
    sparse_attention = SPARSE_ATTENTION
    output_gate = OUTPUT_GATE
    token_gate = TOKEN_GATE
    causal_conv = CAUSAL_CONV
    gated_delta = GATED_DELTA
    gated_norm = GATED_NORM
    selective_scan = SELECTIVE_SCAN
    ssd = SSD
    linear_attention = LINEAR_ATTENTION
    delta_attention = DELTA_ATTENTION
    wkv = WKV
    sample = SAMPLE
    noised = NOISED
    draw_part = DRAW_PART
    best_of_parts = BEST_OF_PARTS
    mask_logits = MASK_LOGITS
    score_tokens = SCORE_TOKENS
    step_inputs = STEP_INPUTS
    step_metadata = STEP_METADATA
    step_advance = STEP_ADVANCE
    step_verify = STEP_VERIFY
    step_keep = STEP_KEEP
    step_wait = STEP_WAIT
    step_compact = STEP_COMPACT
    step_post = STEP_POST
    lookup_drafts = LOOKUP_DRAFTS
    recent_drafts = RECENT_DRAFTS
    patches = PATCHES
    log_mel = LOG_MEL

    def __init__(self, platform: Platform, overrides: Overrides | None = None) -> None:
        wanted = overrides or {}
        if unknown := sorted(set(wanted) - OPS.keys()):
            raise InvalidConfig(f"there is no op {unknown[0]!r}; known: {', '.join(OPS)}.")
        self.platform = platform
        self.deterministic = any(each.items() <= wanted.items() for each in (DETERMINISTIC, DETERMINISTIC_ON_CPU))
        if on_gpu(platform):
            settle_cache_keys()
        asked = {name: wanted.get(name, wanted.get(op.of)) for name, op in OPS.items()}
        self.chosen = {name: op.chosen(platform, asked[name]) for name, op in OPS.items()}

    def load(self, op: Op[Any]) -> Any:
        """Import the function that was chosen for an op, and keep it. A model needs some of all ops, and reading the
        kernels of the others takes longer than everything else that is decided before it is loaded."""
        setattr(self, op.name, found := op.choose(self.platform, self.chosen[op.name]))
        return found


OPS: Mapping[str, Op[Any]] = {name: op for name, op in vars(Ops).items() if isinstance(op, Op)}

# The name of implementations whose results for a token do not depend on the tokens beside it
BATCH_INVARIANT = "batch_invariant"


def _those_with(implementation: str) -> Overrides:
    return {
        name: implementation for name, op in OPS.items() if any(i.name == implementation for i in op.implementations)
    }


DETERMINISTIC = _those_with(BATCH_INVARIANT)
DETERMINISTIC_ON_CPU = _those_with(FIXED_TILES)  # models of plain attention and feed-forwards need no others


def deterministic_ops(platform: Platform) -> Overrides:
    """Return the implementations whose results for a token do not depend on the tokens beside it."""
    return DETERMINISTIC if on_gpu(platform) else DETERMINISTIC_ON_CPU
