"""The memory of fine-tuning on one device, by part, from a model's config alone.

* weights: of layers 4.19 bits a number in NF4 (`nf4_bytes`), else 2 bytes, or 4 if they learn; of others 2 or 4
* adapter, gradients, optimizer: float32; AdamW has two moments. Of paged ones a part is on the device during a step
* activations: inputs and outputs of every product, and the sums in front of norms; with recomputation each layer's two
  inputs, and one whole layer
* work: the gradients of one layer's inner activations, and one matrix as plain numbers (NF4)
* logits: those of a part of the tokens, whose gradient takes their place; the head's gradient if it learns

The sums are what tensors take. An allocator rounds up, and libraries have memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.core.specs.model import ModelSpec, Product
from ridgeline.perf.footprint import parameters

NARROW, WIDE = 2, 4  # bytes of bfloat16 and float32
GROUP, RUN = 64, 256  # of NF4: inputs that share a scale of 8 bits, and such that share one of 16 bits
PAGE = 1 << 27  # bytes of moments that are on the device at once
CHUNK, WIDE_CHUNK = 2048, 8192  # tokens whose logits exist at once; where the output layer learns


def nf4_bytes(inputs: int, outputs: int) -> float:
    """Return the bytes of a matrix in NF4: 4 + 8 / 64 + 16 / 256 bits a number; a scale has 32 bits where 256 does not
    divide the inputs, and numbers have 16 where 64 does not."""
    if inputs % GROUP:
        return float(NARROW * inputs * outputs)
    scales = 8 / GROUP + 16 / RUN if inputs % RUN == 0 else 32 / GROUP
    return inputs * outputs * (4 + scales) / 8


def adapter_numbers(model: ModelSpec, rank: int) -> int:
    """Return the numbers of LoRA's matrices on all linear layers, where fused projections have one each."""
    total = 0
    for layer in model.layers:
        for name, product in layer.products(model.hidden_size).items():
            parts = {"qkv": 3, "gate_up": 2}.get(name, 1)
            total += product.copies * rank * (parts * product.inputs + product.outputs)
    return total


def tuning_memory(
    model: ModelSpec, method: str, *, tokens: int, rank: int = 16, recompute: bool = False, paged: bool = False
) -> Mapping[str, float]:
    """Return the bytes of each part, for packs of so many tokens, all of which are scored. method: lora, qlora or
    full."""
    count, full = parameters(model), method == "full"
    each = WIDE if full else NARROW
    others = (count.unembed + count.embed + count.vectors) * each
    layers = [list(layer.products(model.hidden_size).values()) for layer in model.layers]
    if method == "qlora":
        held = sum(p.copies * nf4_bytes(p.inputs, p.outputs) for products in layers for p in products)
    else:
        held = float(count.products * each)
    learns = count.total if full else adapter_numbers(model, rank)
    moments = float(2 * WIDE * learns)
    kept = [tokens * _kept(products, model.hidden_size) for products in layers]
    entry = tokens * model.hidden_size * 2 * NARROW
    activations = len(layers) * entry + max(kept) if recompute else sum(kept)
    widest = max((p.inputs * p.outputs for products in layers for p in products), default=0)
    inner = max(tokens * NARROW * (sum(p.outputs for p in products) + products[-1].inputs) for products in layers)
    logits = min(tokens, WIDE_CHUNK if full else CHUNK) * model.vocab_size * NARROW
    return {
        "weights": held + others,
        "adapter": 0.0 if full else float(WIDE * learns),
        "gradients": float(WIDE * learns),
        "optimizer": min(moments, float(PAGE)) if paged else moments,
        "activations": float(activations + tokens * model.hidden_size * NARROW),
        "work": float(inner + (NARROW * widest if method == "qlora" else 0)),
        "logits": float(logits + (2 * WIDE * model.vocab_size * model.hidden_size if full else 0)),
    }


def _kept(products: list[Product], width: int) -> float:
    """Return the bytes of a token that the backward pass of a layer needs. Outputs that are added to the residual are
    not kept; the two sums in front of the norms are."""
    total = 2.0 * NARROW * width
    for product in products:
        total += NARROW * product.used * (product.inputs + (product.outputs if product.outputs != width else 0))
    return total
