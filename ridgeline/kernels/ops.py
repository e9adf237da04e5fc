"""The set of ops chosen for one platform, built once and handed to the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.kernels.op import Overrides, Platform, load_op

OPS = {
    "embedding": "ridgeline.kernels.embedding.op:EMBEDDING",
    "linear": "ridgeline.kernels.gemm.op:LINEAR",
    "rms_norm": "ridgeline.kernels.norm.op:RMS_NORM",
    "layer_norm": "ridgeline.kernels.norm.op:LAYER_NORM",
    "rope": "ridgeline.kernels.rotary.op:ROPE",
    "gated_activation": "ridgeline.kernels.activation.op:GATED_ACTIVATION",
    "activation": "ridgeline.kernels.activation.op:ACTIVATION",
    "write_kv": "ridgeline.kernels.attention.op:WRITE_KV",
    "paged_attention": "ridgeline.kernels.attention.op:PAGED_ATTENTION",
    "sample": "ridgeline.kernels.sampling.op:SAMPLE",
}


class Ops:
    """One chosen function per op. `overrides`: op name → implementation name ("reference" always exists)."""

    embedding: Callable[..., Any]
    linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    layer_norm: Callable[..., Any]
    rope: Callable[..., Any]
    gated_activation: Callable[..., Any]
    activation: Callable[..., Any]
    write_kv: Callable[..., Any]
    paged_attention: Callable[..., Any]
    sample: Callable[..., Any]

    def __init__(self, platform: Platform, overrides: Overrides | None = None) -> None:
        self.platform = platform
        for name, target in OPS.items():
            setattr(self, name, load_op(target).choose(platform, (overrides or {}).get(name)))
