"""The set of ops chosen for one platform, built once and handed to the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.launch import settle_cache_keys
from ridgeline.kernels.op import Overrides, Platform, load_op, on_gpu, preparation

OPS = {
    "embedding": "ridgeline.kernels.embedding.op:EMBEDDING",
    "linear": "ridgeline.kernels.gemm.op:LINEAR",
    "norm_linear": "ridgeline.kernels.gemm.op:NORM_LINEAR",
    "rms_norm": "ridgeline.kernels.norm.op:RMS_NORM",
    "layer_norm": "ridgeline.kernels.norm.op:LAYER_NORM",
    "rope": "ridgeline.kernels.rotary.op:ROPE",
    "rope_kv": "ridgeline.kernels.rotary.op:ROPE_KV",
    "gated_activation": "ridgeline.kernels.activation.op:GATED_ACTIVATION",
    "activation": "ridgeline.kernels.activation.op:ACTIVATION",
    "attention_schedule": "ridgeline.kernels.attention.op:ATTENTION_SCHEDULE",
    "paged_attention": "ridgeline.kernels.attention.op:PAGED_ATTENTION",
    "decode_attention": "ridgeline.kernels.attention.decode_op:DECODE_ATTENTION",
    "sample": "ridgeline.kernels.sampling.op:SAMPLE",
    "mask_logits": "ridgeline.kernels.sampling.op:MASK_LOGITS",
    "score_tokens": "ridgeline.kernels.sampling.op:SCORE_TOKENS",
    "step_inputs": "ridgeline.kernels.step.op:STEP_INPUTS",
    "step_advance": "ridgeline.kernels.step.op:STEP_ADVANCE",
    "step_post": "ridgeline.kernels.step.op:STEP_POST",
}

# Implementations whose results for a token do not depend on the tokens beside it
DETERMINISTIC = dict.fromkeys(
    ("linear", "norm_linear", "rope_kv", "attention_schedule", "decode_attention", "sample", "score_tokens"), "fixed"
)


class Ops:
    """One chosen function per op. `overrides`: op name → implementation name ("reference" always exists).

    prepare_weight: makes of a linear map's loaded weight [O, I] what `linear` and `norm_linear` read fastest. Where
    that is the weight itself, or the two do not agree, it returns the weight. What is made has no gradients.
    Raises InvalidConfig for names that do not exist.
    """

    prepare_weight: Callable[[Tensor], Any]
    embedding: Callable[..., Any]
    linear: Callable[..., Any]
    norm_linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    layer_norm: Callable[..., Any]
    rope: Callable[..., Any]
    rope_kv: Callable[..., Any]
    gated_activation: Callable[..., Any]
    activation: Callable[..., Any]
    attention_schedule: Callable[..., Any]
    paged_attention: Callable[..., Any]
    decode_attention: Callable[..., Any]
    sample: Callable[..., Any]
    mask_logits: Callable[..., Any]
    score_tokens: Callable[..., Any]
    step_inputs: Callable[..., Any]
    step_advance: Callable[..., Any]
    step_post: Callable[..., Any]

    def __init__(self, platform: Platform, overrides: Overrides | None = None) -> None:
        if unknown := sorted(set(overrides or ()) - OPS.keys()):
            raise InvalidConfig(f"there is no op {unknown[0]!r}; known: {', '.join(OPS)}.")
        self.platform = platform
        if on_gpu(platform):
            settle_cache_keys()
        wanted = overrides or {}
        for name, target in OPS.items():
            setattr(self, name, load_op(target).choose(platform, wanted.get(name)))
        forms = {load_op(OPS[name]).preparation(platform, wanted.get(name)) for name in ("linear", "norm_linear")}
        self.prepare_weight = preparation(forms.pop() if len(forms) == 1 else "")
