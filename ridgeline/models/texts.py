"""The text model of a model that sees pictures or hears sounds, by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.models.config import ModelConfig

PARTS = ("tower.", "listener.")  # begin the names of parameters that are left out
WHOLE = "model."  # begins the names of files that others have without it


def texts_alone(model: ModelConfig) -> ModelConfig:
    """Return the model without its tower and its listener, whose tensors are passed over in the files. Its prompts may
    still hold vectors that others have made of pictures and sounds. Raise InvalidConfig for a model that cannot be
    without them."""
    spec = model.spec
    if spec.encoder is not None or spec.crosses or (spec.pooling is not None and spec.pooling.apart):
        raise InvalidConfig(
            f"language_model_only: {spec.architecture} is no text model with a tower before it; leave it out."
        )
    if spec.tower is None and spec.listener is None:
        return model
    kept = {name: sources for name, sources in model.weights.items() if not name.startswith(PARTS)}
    unused = tuple(dict.fromkeys((*spec.unused, *_left_out(model.weights, kept))))
    alone = replace(spec, tower=None, listener=None, elsewhere=spec.media_widths, unused=unused)
    return replace(model, spec=alone, weights=kept)


def towers_alone(model: ModelConfig) -> ModelConfig:
    """Return the tower or listener without the text model, whose tensors are passed over in the files. A
    prompt is one picture or sound, and has all of its vectors. Raise InvalidConfig for a model without."""
    spec = model.spec
    senses = [each for each in (spec.tower, spec.listener) if each is not None]
    if not senses or spec.crosses or spec.pooling is not None or isinstance(spec.tower, CodedTowerSpec):
        raise InvalidConfig(
            f"mm_encoder_only: {spec.architecture} makes no vectors that stand in prompts; leave it out."
        )
    kept = {name: sources for name, sources in model.weights.items() if name.startswith(PARTS)}
    pooling = PoolingSpec(
        kind="last", task="token_embed", width=max(each.outputs for each in senses), normalize=False, apart=True
    )
    alone = ModelSpec(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        layers=(),
        final_norm=spec.final_norm,
        max_position_embeddings=spec.max_position_embeddings,
        unused=(*spec.unused, *_left_out(model.weights, kept)),
        pooling=pooling,
        tower=spec.tower,
        listener=spec.listener,
        senses_only=True,
    )
    return replace(model, spec=alone, weights=kept)


def _left_out(whole: WeightMap, kept: WeightMap) -> Iterator[str]:
    """Yield the shortest beginnings of the names of the tensors that are left out which no kept one has."""
    taken = {begun for sources in kept.values() for each in sources for begun in _beginnings(each.name)}
    for sources in (own for name, own in whole.items() if name not in kept):
        for each in sources:
            begun = next((one for one in _beginnings(each.name) if one not in taken), "")
            yield from (one for one in (begun, begun.removeprefix(WHOLE)) if one and one not in taken)


def _beginnings(name: str) -> Iterator[str]:
    """Yield the beginnings of a tensor's name that end at a dot, the shortest first, and the name."""
    for index, letter in enumerate(name):
        if letter == ".":
            yield name[: index + 1]
    yield name
