"""A model as its folder says that it pools: by its architecture, by the modules that sentence-transformers keeps beside
it, or because a user asks a decoder to embed or to classify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.specs.model import AttentionSpec, ModelSpec, Source, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, Kind, PoolingSpec
from ridgeline.models import decoder_of
from ridgeline.models.config import Config, ModelConfig
from ridgeline.models.splade import ASKED, masked_head

FILLER = "pad_token"  # the entry of tokenizer_config.json that names the token that fills texts up
RERANKER_TOKENS = ("no", "yes")  # what Qwen3-Reranker answers

MODES: dict[str, Kind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, kw_only=True)
class DenseModule:
    """A dense layer behind the pooling. prefix: what its tensors' names begin with. config: its own config.json."""

    prefix: str
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Modules:
    """The modules that sentence-transformers runs one behind the other.

    pooling: the config of the pooling; None: there is none (a cross-encoder).
    max_tokens: prompts of training had so many tokens at most.
    late: texts are compared by the vectors of their tokens (late interaction).
    splade: the config of a pooling over the head of a masked language model.
    """

    pooling: Mapping[str, Any] | None = None
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    late: bool = False
    splade: Mapping[str, Any] | None = None


def pooled(
    model: ModelConfig,
    config: Mapping[str, Any],
    modules: Modules | None,
    *,
    runner: str,
    convert: str,
    token_id: Callable[[str], int | None],
) -> ModelConfig:
    """Return the model as it pools, or as it is if it generates. Raise InvalidConfig or ModelLoadError.

    modules: None: sentence-transformers keeps nothing beside the model.
    runner, convert: as in `LLMConfig`. token_id: finds a token's id by its text, or that of FILLER.
    """
    spec = model.spec
    if not _pools(spec, config, modules, runner, convert):
        return model
    if modules is not None and modules.max_tokens is not None:
        spec = replace(spec, max_position_embeddings=min(spec.max_position_embeddings, modules.max_tokens))
    values = Config(config)
    if convert == "classify" and spec.pooling is None:
        return _by_tokens(model, spec, values, token_id)
    if spec.pooling is not None and not spec.pooling.embeds:
        if convert == "embed":
            raise InvalidConfig("convert is embed, and the model classifies; leave convert out.")
        return replace(model, spec=spec)
    if convert == "classify":
        raise InvalidConfig("convert is classify, and the model has no map to labels; leave convert out.")
    if spec.pooling is not None and spec.pooling.apart:
        filler = token_id(FILLER) if spec.pooling.filled else None
        own = spec.pooling if filler is None else replace(spec.pooling, filler=filler)
        return replace(model, spec=replace(spec, pooling=own))
    modules = modules or Modules()
    if modules.splade is not None or ASKED in (config.get("architectures") or ()):
        return _of_vocabulary(model, spec, values, modules.splade or {})
    return _embedding(model, spec, values, modules)


def _pools(spec: ModelSpec, config: Mapping[str, Any], modules: Modules | None, runner: str, convert: str) -> bool:
    bare = spec.sees_behind or _lacks_output(config)
    pools = (
        spec.pooling is not None
        or bare
        or (modules is not None and (modules.pooling is not None or modules.late or modules.splade is not None))
    )
    if runner == "generate":
        if spec.pooling is not None or bare:
            raise InvalidConfig("runner is generate, and this model embeds or classifies; leave runner out.")
        return False
    return pools or runner == "pooling" or convert in ("embed", "classify")


def _of_vocabulary(model: ModelConfig, spec: ModelSpec, config: Config, settings: Mapping[str, Any]) -> ModelConfig:
    """Return a model whose vectors have a number for every entry of the vocabulary."""
    kind, head, tensors = masked_head(spec, config, settings)
    pooling = PoolingSpec(
        kind=kind, task="embed", width=spec.vocab_size, head=head, normalize=False, token_types=spec.token_types
    )
    return replace(model, spec=replace(spec, pooling=pooling), weights={**model.weights, **tensors})


def _lacks_output(config: Mapping[str, Any]) -> bool:
    """Return True for a decoder that was saved without an output layer."""
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and decoder_of(name) is not None for name in names)


def _embedding(model: ModelConfig, spec: ModelSpec, config: Config, modules: Modules) -> ModelConfig:
    """Return a model that embeds."""
    if any(not isinstance(layer.mixer, AttentionSpec) for layer in spec.layers):
        raise InvalidConfig("only models of plain attention embed; run this one with runner generate.")
    given = modules.pooling
    kind: Kind = (spec.pooling.kind if spec.pooling is not None else "last") if given is None else pooling_kind(given)
    own = spec.pooling.head if spec.pooling is not None else ()
    head = (*own, *(_dense(module) for module in modules.dense))
    late = modules.late or (spec.pooling is not None and spec.pooling.task == "token_embed")
    pooling = PoolingSpec(
        kind=kind,
        task="token_embed" if late else "embed",
        width=head[-1].outputs if head else spec.hidden_size,
        head=head,
        whole=spec.sees_behind or kind == "mean",
        normalize=given is None or modules.normalize,  # as PyLate does without such a module
        dimensions=_dimensions(config),
        token_types=spec.token_types,
    )
    weights: WeightMap = {name: sources for name, sources in model.weights.items() if not name.startswith("unembed.")}
    for index, module in enumerate(modules.dense, start=len(own)):
        for kind_of in ("weight",) if pooling.head[index].biasless else ("weight", "bias"):
            weights[f"head.maps.{index}.dense.{kind_of}"] = (Source(name=f"{module.prefix}linear.{kind_of}"),)
    scored = (source.name for name in model.weights if name.startswith("unembed.") for source in model.weights[name])
    unused = (*spec.unused, "lm_head.", *scored)
    return replace(model, spec=replace(spec, pooling=pooling, unused=unused), weights=weights)


def pooling_kind(config: Mapping[str, Any]) -> Kind:
    """Return the kind of pooling that a config of sentence-transformers names. Raise ModelLoadError for others."""
    mode = config.get("pooling_mode")
    chosen = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
    for name, value in config.items():
        if name.startswith("pooling_mode_") and value is True:
            chosen.append(name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token"))
    if config.get("include_prompt") is False:
        raise ModelLoadError("the pooling leaves prompts out (include_prompt is false), which is not supported.")
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise ModelLoadError(f"the pooling is {' and '.join(map(str, chosen)) or 'none'}; known: {', '.join(MODES)}.")
    return MODES[chosen[0]]


def _dense(module: DenseModule) -> HeadSpec:
    config = Config(module.config)
    config.refuse("use_residual", "only plain dense layers run")
    name = str(config.raw("activation_function") or "Identity").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"a dense layer has the activation {name[:80]!r}; known: {', '.join(ACTIVATIONS)}.")
    biasless = config.raw("bias") is False
    return HeadSpec(outputs=config.integer("out_features"), biasless=biasless, activation=ACTIVATIONS[name])  # type: ignore[arg-type]


def _dimensions(config: Config) -> tuple[int, ...] | None:
    """Return the lengths that the model was trained to be cut to, if it says so (as vLLM's configs do)."""
    found = config.raw("matryoshka_dimensions")
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, int) and each > 0 for each in found):
        raise ModelLoadError("matryoshka_dimensions in config.json must be a list of whole numbers.")
    return tuple(found)


def _by_tokens(
    model: ModelConfig, spec: ModelSpec, config: Config, token_id: Callable[[str], int | None]
) -> ModelConfig:
    """Return a decoder that classifies by the scores of tokens as the next one (Qwen3-Reranker)."""
    named = config.raw("classifier_from_token")
    texts = RERANKER_TOKENS if named is None else tuple(named) if isinstance(named, list) else ()
    ids = [token_id(text) if isinstance(text, str) else None for text in texts]
    if not ids or any(i is None or i >= spec.vocab_size for i in ids):
        raise ModelLoadError(
            f"convert is classify, and the tokens {', '.join(map(str, texts)) or 'of classifier_from_token'} that the "
            "labels are recognized by are not in the vocabulary; name others in classifier_from_token of config.json."
        )
    difference = len(ids) == 2 and (named is None or config.boolean("is_original_qwen3_reranker"))
    pooling = PoolingSpec(
        kind="last",
        task="classify",
        width=1 if difference else len(texts),
        whole=False,
        normalize=False,
        activation="sigmoid" if difference else "softmax",
        labels=(texts[1],) if difference else texts,
        tokens=tuple(i for i in ids if i is not None),
        difference=difference,
    )
    return replace(model, spec=replace(spec, pooling=pooling))
