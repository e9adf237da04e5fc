"""The least work of a tower: bytes and floating-point operations of the patches that it sees at once."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.specs.model import Product, attention_of
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.attention.packed.cost import packed_attention_cost
from ridgeline.kernels.base.cost import Cost, OpCost
from ridgeline.kernels.gemm.plain.cost import linear_cost


def tower_ops(spec: TowerSpec, frames: Sequence[int], near: Sequence[int] = (), itemsize: int = 2) -> list[OpCost]:
    """Return the matrix products and the attention of a tower; norms and activations are left out.

    frames: the patches of each view, or of each frame of a video.
    near: those of each window, for a tower that has some.
    itemsize: bytes of a number.
    """
    patches, vectors = sum(frames), sum(frames) // spec.projector.merge**2

    def product(each: Product, rows: int) -> Cost:
        return linear_cost(rows, each.inputs, each.outputs, itemsize=itemsize)

    found = [OpCost("patch", product(Product(spec.patch_width, spec.width), patches))]
    for index, layer in enumerate(spec.layers):
        for name, each in layer.products(spec.width).items():
            found.append(OpCost(f"layers.{name}", product(each, patches)))
        if (own := attention_of(layer.mixer)) is None:
            continue
        heads = {"num_heads": own.num_heads, "num_kv_heads": own.num_kv_heads, "head_dim": own.head_dim}
        seen = frames if index in spec.whole or not spec.window else near
        found.append(OpCost("layers.attention", packed_attention_cost(seen, itemsize=itemsize, **heads)))
    for projector in spec.projectors:
        found += [OpCost("projector", product(each, vectors)) for each in projector.products(spec.width)]
    return found
