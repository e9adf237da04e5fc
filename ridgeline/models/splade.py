"""The heads of masked language models as poolings (SPLADE, arXiv 2109.10086): of every entry of the vocabulary the
largest or the summed score over a text's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, Kind
from ridgeline.models.config import Config
from ridgeline.models.names import named

ASKED = "BertSpladeSparseEmbeddingModel"  # vLLM's name for a BERT that is to pool so
POOLINGS: dict[str, Kind] = {"max": "max", "sum": "sum"}


class Masked(NamedTuple):
    """The names of a masked language model's head: of its map, its norm and its bias, and of the entry of config.json
    with its activation (None: GELU)."""

    dense: str
    norm: str
    bias: str
    activation: str | None = None


HEADS = {
    "BertModel": Masked(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "hidden_act",
    ),
    "DistilBertModel": Masked("vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "activation"),
    "RobertaModel": Masked("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "MPNetModel": Masked("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
}


def masked_head(
    spec: ModelSpec, config: Config, settings: Mapping[str, Any]
) -> tuple[Kind, tuple[HeadSpec, ...], WeightMap]:
    """Return the kind of pooling, the head's maps and their tensors. Raise ModelLoadError.

    settings: those of sentence-transformers' SpladePooling.
    """
    if spec.architecture not in HEADS:
        raise ModelLoadError(
            f"the pooling is SPLADE's, which needs the head of a masked language model; known: {', '.join(HEADS)}."
        )
    names, strategy = HEADS[spec.architecture], settings.get("pooling_strategy", "max")
    function = settings.get("activation_function", "relu")
    if strategy not in POOLINGS or function not in ("relu", "log1p_relu"):
        raise ModelLoadError(
            f"SPLADE's pooling is {str(strategy)[:80]!r} of {str(function)[:80]!r}; known: max and sum, of relu and "
            "log1p_relu."
        )
    inner = config.activation(names.activation) if names.activation and names.activation in config else "gelu"
    head = (
        HeadSpec(outputs=spec.hidden_size, activation=inner, norm_eps=spec.final_norm.eps),
        HeadSpec(
            outputs=spec.vocab_size,
            tied=True,
            activation="log1p_relu" if function == "relu" else "log1p_log1p_relu",
        ),
    )
    weights = named("head.maps.0", "", {"dense": names.dense, "norm": names.norm}, bias=True)
    weights["head.maps.1.dense.bias"] = (Source(name=names.bias),)
    return POOLINGS[strategy], head, weights
