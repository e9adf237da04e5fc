"""The work of a tower: from the pixels of pictures to vectors, op by op.

A tower runs in the step that runs the first token of a picture, and in no other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.model import ABSENT, LayerSpec, Product
from ridgeline.core.specs.sam import SHRINKS, SamTowerSpec
from ridgeline.core.specs.tower import ProjectorSpec, TowerSpec
from ridgeline.kernels.base.cost import OpCost, StepShape
from ridgeline.kernels.small.activation.cost import activation_cost
from ridgeline.perf.parts import FEED_FORWARDS, MIXERS, NormBefore, Priced, Reach, product_cost
from ridgeline.perf.precision import Precision

TOWER = "tower."  # begins the names of its ops


def tower_ops(tower: TowerSpec, views: Sequence[int], p: Precision) -> Iterator[OpCost]:
    """Yield every op of the tower and its projectors, for views of so many patches each (of a video: frames of so
    many). Equal ops are counted. The resize of pixels is left out, as its work depends on their number."""
    patches = sum(views)
    if isinstance(tower, CodedTowerSpec):
        yield from _coded_ops(tower, views, p)
        return
    if isinstance(tower, SamTowerSpec):
        yield from _sam_ops(tower, views, p)
        return
    rows = tower.rows_of(views)
    found: Counter[Priced] = Counter()
    found["patch", product_cost("patch", Product(tower.patch_width, tower.width, tower.patch_bias), patches, p)] += 1
    near = _windows(tower, rows)
    for index, layer in enumerate(tower.every_layer):
        found.update(_layer_ops(layer, tower.width, rows if index in tower.whole or not tower.window else near, p))
        if tower.middle is not None and index == tower.middle.behind:
            squares = tower.middle.projector.merge**2
            found.update(_layer_ops(tower.middle.layer, tower.width, [squares] * (patches // squares), p))
            found.update(_projector_ops(tower.middle.projector, tower.width, patches, p))
            rows, patches = [each // squares for each in rows], patches // squares
    for own in tower.projectors:
        found.update(_projector_ops(own, tower.read, own.made(patches, len(views)) * own.merge**2, p))
    for (name, cost), times in found.items():
        yield OpCost(f"{TOWER}{name}", cost, times)


def _sam_ops(tower: SamTowerSpec, views: Sequence[int], p: Precision) -> Iterator[OpCost]:
    """Yield the ops of the layers, of the convolutions, and of the layers that read their output. The products with
    vectors of distances are left out."""
    patches, found = sum(views), Counter[Priced]()
    found["patch", product_cost("patch", Product(tower.patch_width, tower.width, tower.patch_bias), patches, p)] += 1
    near = tower.windows_of(views)
    for index, layer in enumerate(tower.layers):
        found.update(_layer_ops(layer, tower.width, list(views) if index in tower.whole else near, p))
    for inputs, outputs, taps, shrunk in tower.convolutions:
        product = Product(inputs * taps**2, outputs)
        found["convolution", product_cost("convolution", product, patches // shrunk, p)] += 1
    left = [each // SHRINKS**2 for each in views]
    seen = [each + 1 if tower.reader.side else 2 * each for each in left]
    for layer in tower.reader.layers:
        found.update(_layer_ops(layer, tower.reader.width, seen, p))
    last = Product(tower.read, tower.projector.outputs, tower.projector.bias)
    found["projector.0", product_cost("projector.0", last, sum(left), p)] += 1
    yield from (OpCost(f"{TOWER}{name}", cost, times) for (name, cost), times in found.items())


def _coded_ops(tower: CodedTowerSpec, views: Sequence[int], p: Precision) -> Iterator[OpCost]:
    """Yield the products of convolutions, of places that see each other, and of codes. Its norms are left out."""
    found: Counter[Priced] = Counter()
    patches = sum(views)
    for each in tower.convolutions:
        product = Product(each.inputs * each.taps**2, each.outputs, True)
        found["convolution", product_cost("convolution", product, patches * each.places, p)] += 1
    for own in tower.views_seen:
        for places in (view * own.places for view in views):
            found["attention", product_cost("attention", Product(own.channels, places), places, p)] += 2
    found["codes", product_cost("codes", Product(tower.code_width, len(tower.tokens)), patches, p)] += 1
    yield from (OpCost(f"{TOWER}{name}", cost, times) for (name, cost), times in found.items())


def _layer_ops(layer: LayerSpec, width: int, seen: Sequence[int], p: Precision) -> list[Priced]:
    """Return the ops of a layer whose patches see so many each, themselves included."""
    tokens, mixer = sum(seen), layer.mixer
    norm = NormBefore("rms" if layer.norm.kind == "rms" else "layer", residual=True)
    ops = [(name, product_cost(name, each, tokens, p)) for name, each in mixer.products(width).items()]
    ops += MIXERS[mixer.kind](mixer, StepShape(seen, seen, 0), tokens, p, None)
    ops.append(("mixer_norm", norm.cost(tokens, width, p)))
    if layer.feed_forward is not ABSENT:
        ops += FEED_FORWARDS[layer.feed_forward.kind](layer.feed_forward, width, norm, tokens, p, Reach())
    return ops


def _projector_ops(own: ProjectorSpec, width: int, patches: int, p: Precision) -> list[Priced]:
    vectors = patches // own.merge**2
    names = [(f"projector.{number}", each) for number, each in enumerate(own.products(width))]
    ops = [(name, product_cost(name, each, vectors, p)) for name, each in names]
    if own.norm is not None:
        wide = own.norm_width(width)
        norm = NormBefore("rms" if own.norm.kind == "rms" else "layer", residual=False)
        ops.append(("projector.norm", norm.cost(vectors if own.joined == "mean" else patches * width // wide, wide, p)))
    if own.hidden:
        cost = activation_cost(vectors, own.hidden, kind=own.activation, itemsize=p.item)
        ops.append(("projector.activation", cost))
    return ops


def _windows(tower: TowerSpec, rows: Sequence[int]) -> list[int]:
    """Return the patches of each window, if all windows but the last of each view are whole."""
    most = (tower.window * tower.merge) ** 2
    if not most:
        return list(rows)
    return [size for each in rows for size in ([most] * (each // most) + ([each % most] if each % most else []))]
