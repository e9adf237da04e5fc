"""The stages of a pipeline: each computes some consecutive layers of a model, and hands its output to the next one.

The first stage embeds tokens, the last one scores them. A step takes as long as its slowest stage, so layers are dealt
out by the bytes of their weights, with which time grows; the output layer counts like a layer of its bytes.

Layers of several stages may share a block of weights. Then each of these stages has its own copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeVar

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import LayerSpec, ModelSpec, StageSpec, WeightMap, lender_of
from ridgeline.core.specs.shared import SharedBlockSpec

T = TypeVar("T")

HEAD = ("unembed", "final_norm")  # the decoder's modules behind its layers


def check_stages(model: ModelSpec, stages: int) -> None:
    """Raise InvalidConfig if the model cannot be divided into so many stages."""
    if stages > len(model.layers):
        raise InvalidConfig(
            f"pipeline_parallel_size is {stages}, and the model has {len(model.layers)} layers; each stage needs one."
        )
    borrow = any(lender_of(layer.mixer) is not None for layer in model.layers)
    late = any(layer.late_addend for layer in model.layers)
    if stages > 1 and (borrow or late or model.layer_inputs is not None):
        raise InvalidConfig(
            f"pipeline_parallel_size is {stages}, and this model's layers need more of others than their output: "
            "inputs of their own, earlier layers' keys or choices, or late sums; set tensor_parallel_size instead."
        )


def deal(model: ModelSpec, stages: int, wanted: str | None = None) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the slowest is as fast as can be.

    wanted: a user's own numbers, as "10,12,10". Raises InvalidConfig if they, or so many stages, do not fit the model.
    """
    check_stages(model, stages)
    if wanted is not None:
        return _wanted(model, stages, wanted)
    weights = {layer: _weight(layer, model.hidden_size) for layer in dict.fromkeys(model.layers)}
    ends = [0, *accumulate(weights[layer] for layer in model.layers)]
    ends[-1] += model.vocab_size * model.hidden_size
    return _cut(tuple(ends), stages)


@cache
def _cut(ends: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the heaviest is as light as can be, and then the others are
    alike. ends[n]: the weight of the first n layers."""
    layers = len(ends) - 1
    worst = (ends[-1] + 1, 0)
    # best[s][n], of s stages of n layers: (weight of the heaviest, sum of squares), and where the last stage begins
    best = [[((0, 0), 0)] + [(worst, 0)] * layers]
    for _ in range(stages):
        row = [(worst, 0)]
        for end in range(1, layers + 1):
            options = []
            for start in range(end):
                (heaviest, squares), own = best[-1][start][0], ends[end] - ends[start]
                options.append(((max(heaviest, own), squares + own * own), start))
            row.append(min(options))
        best.append(row)
    counts, end = list[int](), layers
    for stage in range(stages, 0, -1):
        start = best[stage][end][1]
        counts.insert(0, end - start)
        end = start
    return tuple(counts)


def _wanted(model: ModelSpec, stages: int, wanted: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in wanted.split(","))
    except ValueError:
        raise InvalidConfig(f'pipeline_layer_partition is {wanted!r}; give numbers of layers, as "10,12,10".') from None
    if len(counts) != stages or min(counts) < 1 or sum(counts) != len(model.layers):
        raise InvalidConfig(
            f"pipeline_layer_partition is {wanted!r}; it must name {stages} stages of at least one layer, "
            f"{len(model.layers)} layers in all."
        )
    return counts


def _weight(layer: LayerSpec, width: int) -> int:
    """Return the numbers of a layer's matrices. Those that an earlier layer holds count, since they are read too."""
    products = layer.products(width).values()
    return sum(max(1, product.copies) * product.inputs * product.outputs for product in products)


def stage_of(model: ModelSpec, stage: int, counts: Sequence[int]) -> ModelSpec:
    """Return the spec of one stage, where stages have so many layers each. Where two stages share the table of tied
    embeddings, each has its own copy."""
    if len(counts) == 1:
        return model
    check_stages(model, len(counts))
    starts = [0, *accumulate(counts)]
    first, last = stage == 0, stage == len(counts) - 1
    parts = (model.layers[start:end] for start, end in pairwise(starts))
    by_stage = [Counter(state for layer in part for state in layer.mixer.states) for part in parts]
    depths = tuple((group.spec, max(each[group.spec] for each in by_stage)) for group in model.cache_groups)
    layers, copied = _with_own_blocks(model, starts[stage], starts[stage + 1])
    embedded = any(layer.embedded for layer in model.layers)
    own = StageSpec(start=starts[stage], first=first, last=last, depths=depths, embedded=embedded, copied=tuple(copied))
    return replace(model, layers=tuple(layers), tie_word_embeddings=False, stage=own)


def _with_own_blocks(model: ModelSpec, start: int, end: int) -> tuple[list[LayerSpec], list[tuple[str, str]]]:
    """Return the layers from start to end, the first of which with a shared block has it, and `StageSpec.copied`."""
    layers, copied, first = list[LayerSpec](), list[tuple[str, str]](), dict[int, int]()
    for index, layer in enumerate(model.layers[:end]):
        if isinstance(mixer := layer.mixer, SharedBlockSpec):
            owner = first.setdefault(mixer.block, index)
            if owner < start <= index:
                first[mixer.block] = index
                copied.append((f"layers.{index - start}.mixer.block.", f"layers.{owner}.mixer.block."))
                layer = replace(layer, mixer=replace(mixer, owner=True))
        layers.append(layer)
    return layers[start:], copied


def of_stage(named: Mapping[str, T], spec: ModelSpec) -> dict[str, T]:
    """Return a mapping for a stage's modules or parameters, by the stage's own names, from one by those of the whole
    model."""
    if spec.stage is None:
        return dict(named)
    found = {}
    for name, value in named.items():
        for own, theirs in spec.stage.copied:
            if name.startswith(theirs):
                found[own + name.removeprefix(theirs)] = value
        part, _, rest = name.partition(".")
        if part == "layers":
            number, _, inner = rest.partition(".")
            index = int(number) - spec.stage.start
            if 0 <= index < len(spec.layers):
                found[f"layers.{index}.{inner}"] = value
        elif spec.stage.last if part in HEAD else spec.stage.first:
            found[name] = value
    return found


def weights_of_stage(weights: WeightMap, spec: ModelSpec) -> WeightMap:
    """Return the part of a model's weight map that one of its stages loads."""
    if spec.stage is None:
        return weights
    tied = {} if "unembed.weight" in weights else {"unembed.weight": weights["embed.weight"]}
    return of_stage({**weights, **tied}, spec)
