"""The work of a tower: from the pixels of pictures to vectors, op by op.

A tower runs in the step that runs the first token of a picture, and in no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ridgeline.core.specs.model import Product
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.cost import OpCost, StepShape
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.perf.parts import FEED_FORWARDS, MIXERS, NormBefore, Priced, Reach, product_cost
from ridgeline.perf.precision import Precision

TOWER = "tower."  # begins the names of its ops


def tower_ops(tower: TowerSpec, views: Sequence[int], p: Precision) -> Iterator[OpCost]:
    """Yield every op of the tower and its projectors, for views of so many patches each (of a video: frames of so
    many). Equal ops are counted. The resize of pixels is left out, as its work depends on their number."""
    patches = sum(views)
    rows = tower.rows_of(views)
    found: Counter[Priced] = Counter()
    found["patch", product_cost("patch", Product(tower.patch_width, tower.width, tower.patch_bias), patches, p)] += 1
    near = _windows(tower, rows)
    for index, layer in enumerate(tower.every_layer):
        tokens = sum(rows)
        seen = rows if index in tower.whole or not tower.window else near
        norm = NormBefore("rms" if layer.norm.kind == "rms" else "layer", residual=True)
        mixer = layer.mixer
        ops = [(name, product_cost(name, each, tokens, p)) for name, each in mixer.products(tower.width).items()]
        ops += MIXERS[mixer.kind](mixer, StepShape(seen, seen, 0), tokens, p, None)
        ops.append(("mixer_norm", norm.cost(tokens, tower.width, p)))
        ops += FEED_FORWARDS[layer.feed_forward.kind](layer.feed_forward, tower.width, norm, tokens, p, Reach())
        found.update(ops)
    for own in tower.projectors:
        vectors = patches // own.merge**2
        for number, product in enumerate(own.products(tower.read)):
            found[f"projector.{number}", product_cost(f"projector.{number}", product, vectors, p)] += 1
        if own.norm is not None:
            width = own.norm_width(tower.width)
            norm = NormBefore("rms" if own.norm.kind == "rms" else "layer", residual=False)
            count = vectors if own.averaged else patches * tower.width // width
            found["projector.norm", norm.cost(count, width, p)] += 1
        if own.hidden:
            cost = activation_cost(vectors, own.hidden, kind=own.activation, itemsize=p.item)
            found["projector.activation", cost] += 1
    for (name, cost), times in found.items():
        yield OpCost(f"{TOWER}{name}", cost, times)


def _windows(tower: TowerSpec, rows: Sequence[int]) -> list[int]:
    """Return the patches of each window, if all windows but the last of each view are whole."""
    most = (tower.window * tower.projector.merge) ** 2
    if not most:
        return list(rows)
    return [size for each in rows for size in ([most] * (each // most) + ([each % most] if each % most else []))]
