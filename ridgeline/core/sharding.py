"""One rank's part of a model whose matrices are divided over several devices (Megatron-LM, arXiv 1909.08053).

The first product of a pair is divided by its outputs and the second by its inputs, so that ranks need each other's
results once behind each pair: behind attention's output projection, and behind the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.expert_spec import ExpertsSpec
from ridgeline.core.model_spec import Absent, AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from ridgeline.core.together import DP, TP

EXPERTS = f"enable_expert_parallel with {TP}"

Placement = tuple[tuple[tuple[int, ...], ...], ...]  # of each mixture, of each rank: its experts


class Ranks(NamedTuple):
    """So many ranks, and the name that the user has for their number."""

    number: int
    named: str

    def part(self, what: str, size: int) -> int:
        """Return the size of a rank's part. Raise InvalidConfig if they do not divide it equally."""
        if size % self.number:
            raise InvalidConfig(
                f"{self.named} {self.number} does not divide the model's {size} {what}; choose another number."
            )
        return size // self.number


def part_of(
    model: ModelSpec,
    tp: int,
    *,
    whole_experts: bool = False,
    placement: Placement | None = None,
    sources: int = 1,
    named: str = TP,
) -> ModelSpec:
    """Return the part of the model that one of `tp` ranks computes. Heads, feed-forward (of every expert) and
    vocabulary are divided; key/value heads fewer than `tp` are repeated. The last part of a vocabulary may be short.

    whole_experts: a rank has some of the experts, and all of these. placement: which ones.
    sources: so many ranks have tokens of their own, and divide nothing but the experts.
    named: what the user calls `tp`.

    Raises InvalidConfig if the shape does not divide.
    """
    if sources > 1:
        apart = f"enable_expert_parallel with {DP}"
        check_mixers(model, f"{apart} {sources}")
        return with_experts_of_a_rank(model, sources, placement, sources=sources, named=apart)
    if tp == 1:
        return model
    check_mixers(model, f"{named} {tp}")
    if whole_experts:
        model = with_experts_of_a_rank(model, tp, placement)
    ranks = Ranks(tp, named)
    layers = {layer: _layer(layer, ranks) for layer in dict.fromkeys(model.layers)}
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


def check_mixers(model: ModelSpec, asked: str) -> None:
    """Raise InvalidConfig if a layer has a mixer that no ranks divide yet. asked: the division that is wanted."""
    for layer in model.layers:
        if not isinstance(layer.mixer, (AttentionSpec, Absent)):
            raise InvalidConfig(
                f"{asked} does not divide layers with a mixer of the kind {layer.mixer.kind!r} yet; leave it out, or "
                "divide prompts alone, by prefill_context_parallel_size."
            )


def check_experts(model: ModelSpec, ranks: int, named: str = EXPERTS) -> None:
    """Raise InvalidConfig if so many ranks cannot divide the experts of every mixture equally."""
    if ranks > 1:
        check_mixers(model, f"{named} {ranks}")
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    if ranks > 1 and not mixtures:
        raise InvalidConfig(f"{named} {ranks} is to divide experts, and the model has none; leave it out.")
    for count in {spec.routing.experts for spec in mixtures}:
        if count % ranks:
            raise InvalidConfig(f"{named} {ranks} does not divide the model's {count} experts; choose another number.")


def cut(whole: Sequence[int], part: Sequence[int], rank: int, size: int) -> tuple[slice, ...]:
    """Return where a rank's part of a tensor lies in the whole, from their shapes alone: a dimension of n equal parts
    gives each part to `size` / n neighbouring ranks. The last part may be short.

    >>> cut((8, 4), (2, 4), rank=3, size=4), cut((2, 4), (1, 4), rank=3, size=4)
    ((slice(6, 8, None), slice(0, 4, None)), (slice(1, 2, None), slice(0, 4, None)))
    """
    found = []
    for all_of_it, own in zip(whole, part, strict=True):
        index = rank * -(-all_of_it // max(own, 1)) // size
        found.append(slice(min(index * own, all_of_it), min((index + 1) * own, all_of_it)))
    return tuple(found)


def _layer(spec: LayerSpec, ranks: Ranks) -> LayerSpec:
    attention = spec.attention
    heads = ranks.part("attention heads", attention.num_heads)
    repeated = ranks.number % attention.num_kv_heads == 0
    kv_heads = 1 if repeated else ranks.part("key/value heads", attention.num_kv_heads)
    mixer = replace(attention, num_heads=heads, num_kv_heads=kv_heads)
    if isinstance(spec.feed_forward, ExpertsSpec):
        return replace(spec, mixer=mixer, feed_forward=_experts(spec.feed_forward, ranks))
    return replace(spec, mixer=mixer, feed_forward=_mlp(spec.mlp, ranks))


def _mlp(spec: MLPSpec, ranks: Ranks) -> MLPSpec:
    return replace(spec, intermediate_size=ranks.part("feed-forward columns", spec.intermediate_size))


def _experts(spec: ExpertsSpec, ranks: Ranks) -> ExpertsSpec:
    shared = None if spec.shared is None else _mlp(spec.shared, ranks)
    if spec.held is not None:
        return replace(spec, shared=shared)
    columns = ranks.part("columns of an expert", spec.intermediate_size)
    return replace(spec, intermediate_size=columns, shared=shared)
