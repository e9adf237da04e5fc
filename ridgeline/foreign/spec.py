"""A class of transformers as a `ModelSpec`: its modules' heads, and how many parameters they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import (
    ABSENT,
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Product,
    Products,
)
from ridgeline.foreign.classes import ForeignClass, class_of, said
from ridgeline.foreign.trace import Traced, trace
from ridgeline.models.config import Config, ModelConfig, checkpoint_dtype, sampling_defaults, token_ids

KEPT = 8  # configs whose traces are kept


@dataclass(frozen=True, kw_only=True)
class ForeignAttention(AttentionSpec):
    """Attention that modules of transformers call. rows: so many rows of the model's width have the parameters of the
    layer, its feed-forward included."""

    kind: ClassVar[str] = "foreign"
    rows: int = 0

    @property
    def scratch(self) -> int:
        return self.q_size + sum(self.projected) + self.rows

    def products(self, width: int) -> Products:
        return {"modules": Product(width, self.rows)}

    def part(self, ranks: Ranks) -> ForeignAttention:
        raise InvalidConfig(
            f"this model runs through transformers' modules, which one device computes; leave {ranks.named} out."
        )


def foreign_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    """Return config.json and generation_config.json as a `ModelConfig`. Raise ModelLoadError if transformers has no
    class for it, or one that cannot run with our attention."""
    generate = Config(generation or {})
    text = json.dumps(config, sort_keys=True)
    found, seen = traced_class(text)
    text_config = config.get("text_config")
    base = Config(config, text_config if isinstance(text_config, Mapping) else None)
    eos_ids = token_ids(generate, "eos_token_id") or token_ids(base, "eos_token_id")
    return ModelConfig(
        spec=spec_of(found, seen),
        weights={},
        dtype=checkpoint_dtype(base),
        bos_token_id=next(iter(token_ids(base, "bos_token_id")), None),
        eos_token_ids=tuple(i for i in eos_ids if i < seen.vocabulary),
        sampling_defaults=sampling_defaults(generate),
        foreign=text,
    )


@lru_cache(maxsize=KEPT)
def traced_class(config: str) -> tuple[ForeignClass, Traced]:
    """Return the class that a config.json names, and the findings of its trace."""
    try:
        found = class_of(json.loads(config))
        return found, trace(found)
    except (InvalidConfig, ModelLoadError):
        raise
    except Exception as error:  # a stranger's values may break a class anywhere
        raise ModelLoadError(f"transformers cannot make a model of config.json ({said(error)}).") from error


def spec_of(found: ForeignClass, seen: Traced) -> ModelSpec:
    """Return a class as a network. Parameters that belong to no table count as the layers', each its equal share."""
    tables = seen.vocabulary * seen.width * (1 if seen.tied else 2)
    rows = max(1, round((seen.parameters - tables) / (len(seen.calls) * seen.width)))
    weightless = NormSpec(weightless=True)
    layers = []
    for call in seen.calls:
        mixer = ForeignAttention(
            num_heads=call.heads,
            num_kv_heads=call.kv_heads,
            head_dim=max(call.width, call.value_width),
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
            rows=rows,
        )
        layers.append(LayerSpec(mixer=mixer, feed_forward=ABSENT, norm=weightless))
    return ModelSpec(
        architecture=found.name,
        vocab_size=seen.vocabulary,
        hidden_size=seen.width,
        layers=tuple(layers),
        final_norm=weightless,
        max_position_embeddings=seen.context,
        tie_word_embeddings=seen.tied,
    )
