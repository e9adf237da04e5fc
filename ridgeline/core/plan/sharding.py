"""One rank's part of a model whose matrices are divided over several devices (Megatron-LM, arXiv 1909.08053).

The first product of a pair is divided by its outputs and the second by its inputs, so that ranks need each other's
results once behind each pair: behind attention's output projection, and behind the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.together import DP, TP
from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec

EXPERTS = f"enable_expert_parallel with {TP}"

Placement = tuple[tuple[tuple[int, ...], ...], ...]  # of each mixture, of each rank: its experts


def part_of(
    model: ModelSpec,
    tp: int,
    *,
    whole_experts: bool = False,
    placement: Placement | None = None,
    sources: int = 1,
    named: str = TP,
) -> ModelSpec:
    """Return the part of the model that one of `tp` ranks computes. Each mixer and feed-forward says what its part is;
    the last part of a vocabulary may be short.

    whole_experts: a rank has some of the experts, and all of these. placement: which ones.
    sources: so many ranks have tokens of their own, and divide nothing but the experts.
    named: what the user calls `tp`.

    Raises InvalidConfig if the shape does not divide.
    """
    if sources > 1:
        apart = f"enable_expert_parallel with {DP}"
        return with_experts_of_a_rank(model, sources, placement, sources=sources, named=apart)
    if tp == 1:
        return model
    if whole_experts:
        model = with_experts_of_a_rank(model, tp, placement)
    ranks = Ranks(tp, named)
    layers = {
        layer: replace(
            layer,
            mixer=layer.mixer.part(ranks),
            feed_forward=layer.feed_forward.part(ranks),
            inputs=layer.inputs and replace(layer.inputs, rows=-(-layer.inputs.rows // tp)),
        )
        for layer in dict.fromkeys(model.layers)
    }
    return replace(model, vocab_size=-(-model.vocab_size // tp), layers=tuple(layers[layer] for layer in model.layers))


def with_experts_of_a_rank(
    model: ModelSpec, ranks: int, placement: Placement | None = None, *, sources: int = 1, named: str = EXPERTS
) -> ModelSpec:
    """Return the model with as many experts in each mixture as one of so many ranks holds.

    sources: so many of them have tokens of their own. named: what the user calls the number of ranks.

    Raises InvalidConfig.
    """
    check_experts(model, 1 if placement else ranks, named)
    placed = iter(placement or ())
    return replace(model, layers=tuple(_with_some_experts(layer, ranks, placed, sources) for layer in model.layers))


def _with_some_experts(
    layer: LayerSpec, ranks: int, placed: Iterator[tuple[tuple[int, ...], ...]], sources: int
) -> LayerSpec:
    spec = layer.feed_forward
    if not isinstance(spec, ExpertsSpec):
        return layer
    own = next(placed, None)
    held = spec.routing.experts // ranks if own is None else len(own[0])
    return replace(layer, feed_forward=replace(spec, held=held, placed=own, sources=sources))


def with_cached_experts(model: ModelSpec, slots: int) -> ModelSpec:
    """Return the model with as many experts in each mixture as a device holds that has so many slots."""

    def part(layer: LayerSpec) -> LayerSpec:
        spec = layer.feed_forward
        if not isinstance(spec, ExpertsSpec):
            return layer
        return replace(layer, feed_forward=replace(spec, held=min(slots, spec.routing.experts)))

    return replace(model, layers=tuple(map(part, model.layers)))


def check_experts(model: ModelSpec, ranks: int, named: str = EXPERTS) -> None:
    """Raise InvalidConfig if so many ranks cannot divide the experts of every mixture equally."""
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    if ranks > 1 and any(spec.idle for spec in mixtures):
        raise InvalidConfig(f"{named} {ranks} does not divide experts of which some compute nothing; leave it out.")
    if ranks > 1 and not mixtures:
        raise InvalidConfig(f"{named} {ranks} is to divide experts, and the model has none; leave it out.")
    for count in {spec.routing.experts for spec in mixtures}:
        if count % ranks:
            raise InvalidConfig(f"{named} {ranks} does not divide the model's {count} experts; choose another number.")


def cut(whole: Sequence[int], part: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
    """Return the slices of a tensor that are a rank's part of it, from their shapes alone: a dimension of n equal parts
    gives each part to `size` / n neighbouring ranks. The last part may be short.

    >>> cut((8, 4), (2, 4), rank=3, size=4), cut((2, 4), (1, 4), rank=3, size=4)
    ((slice(6, 8, None), slice(0, 4, None)), (slice(1, 2, None), slice(0, 4, None)))
    """
    found = []
    for all_of_it, own in zip(whole, part, strict=True):
        index = rank * -(-all_of_it // max(own, 1)) // size
        found.append(slice(min(index * own, all_of_it), min((index + 1) * own, all_of_it)))
    return tuple(found)
