"""Heads that draft for another model, from the config.json and the names of the tensors they come with.

Which parts a head has (biases, an output matrix, a vocabulary of its own) is seen from its tensors, as configs rarely
tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.speculation import EAGLE, MEDUSA
from ridgeline.core.specs.draft_head import DraftHeadSpec, HeadConfig, MedusaSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, Source, WeightMap
from ridgeline.models import ARCHITECTURES
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import DEFAULTS, Llama, llama_like

MOST_HEADS = 64  # of Medusa: far more than any checkpoint has
COPIES = ("embed_tokens.", "model.embed_tokens.", "rotary_emb.", "t2d", "d2t", "verifier_", "target_")


def read_head(method: str, config: Mapping[str, Any], tensors: Collection[str], target: ModelSpec) -> HeadConfig:
    """Return the head of a checkpoint. tensors: the names that its files hold; empty where there are none, with which a
    head has all that its config promises. Raise ModelLoadError for values that cannot be run."""
    if method == MEDUSA:
        return _medusa(config, tensors, target)
    values = merged(config, target)
    return (_eagle if method == EAGLE else _eagle3)(values, tensors, target)


def merged(config: Mapping[str, Any], target: ModelSpec) -> dict[str, Any]:
    """Return the entries of a head's config.json, those of its layers too. Raise ModelLoadError if it was made for a
    model of another width or vocabulary."""
    layer = config.get("transformer_layer_config") or {}  # of the format of vLLM's speculators
    if not isinstance(layer, Mapping):
        raise wrong("transformer_layer_config", layer, "an object")
    values = {**config, **layer}
    width = Config(values).integer("hidden_size")
    if width != target.hidden_size:
        raise ModelLoadError(
            f"the head's config.json says hidden_size {width}, and the model's hidden states have "
            f"{target.hidden_size}; take the head that was trained for this model."
        )
    rows = Config({"vocab_size": target.vocab_size, **values}).integer("vocab_size")
    if rows != target.vocab_size:
        raise ModelLoadError(
            f"the head's config.json says vocab_size {rows}, and the model has {target.vocab_size} tokens; take the "
            "head that was trained for this model."
        )
    return values


def _eagle(config: Mapping[str, Any], tensors: Collection[str], target: ModelSpec) -> HeadConfig:
    """EAGLE-1 and -2: they differ in the tree that is drafted, and not in the head."""
    find, base = finder(tensors), _llama(config, tensors)
    values = Config(config)
    normed = values.boolean("add_para_norm") or values.boolean("layernorms")
    first, *others = base.layers
    spec = DraftHeadSpec(
        width=base.hidden_size,
        layers=(replace(first, norms="feed_forward"), *others),
        entry_norm=base.final_norm if normed else None,
        entry_bias=bool(find("fc.bias", "fusion_fc.bias")),
    )
    weights = layer_weights(base, lambda name: find(name, f"model.{name}") or name)
    del weights["layers.0.mixer_norm.weight"]
    for kind in ("weight", "bias") if spec.entry_bias else ("weight",):
        weights[f"entry.{kind}"] = source_of(find(f"fc.{kind}", f"fusion_fc.{kind}") or f"fc.{kind}")
    if normed:
        weights["embed_norm.weight"] = source_of("embedding_layernorm.weight")
        theirs = find("hidden_states_layernorm.weight", "pre_lm_head_layernorm.weight")
        weights["feature_norm.weight"] = source_of(theirs or "hidden_states_layernorm.weight")
    return HeadConfig(spec=spec, weights=weights, unused=(*COPIES, "lm_head.", "model.lm_head."))


def _eagle3(config: Mapping[str, Any], tensors: Collection[str], target: ModelSpec) -> HeadConfig:
    find, base, values = finder(tensors), _llama(config, tensors), Config(config)
    taps = _taps(values, len(target.layers))

    def stored(name: str) -> str:
        middle = name.replace("layers.0.", "midlayer.")
        return find(middle, name, f"model.{middle}", f"model.{name}") or middle

    scored = values.integer("draft_vocab_size") if "draft_vocab_size" in values else target.vocab_size
    if scored > target.vocab_size:
        raise wrong("draft_vocab_size", scored, f"at most {target.vocab_size}, as the model has no more tokens")
    own = not tensors or bool(find("lm_head.weight", "model.lm_head.weight")) or scored != target.vocab_size
    narrow = own and ("d2t" in tensors or scored != target.vocab_size)
    if narrow and tensors and "d2t" not in tensors:
        raise ModelLoadError(
            f"the head scores {scored} of {target.vocab_size} tokens, and its files lack the tensor d2t, which says "
            "which of them; copy the checkpoint again from its source."
        )
    spec = DraftHeadSpec(
        width=base.hidden_size,
        layers=base.layers,
        taps=taps,
        joined="attention",
        entry_norm=base.final_norm,
        normed_residual=values.boolean("norm_before_residual"),
        final_norm=base.final_norm,
        scored=scored if own else 0,
        narrow=narrow,
    )
    found = layer_weights(base, stored)
    ours = {name: name.replace("layers.0.", "meeting.") for name in found}
    for index in range(1, len(base.layers)):
        ours = {name: own.replace(f"layers.{index}.", f"layers.{index - 1}.") for name, own in ours.items()}
    weights = {ours[name]: sources for name, sources in found.items()}
    weights["meeting.embed_norm.weight"] = weights.pop("meeting.mixer_norm.weight")
    weights["meeting.feature_norm.weight"] = source_of(stored("layers.0.hidden_norm.weight"))
    weights["final_norm.weight"] = source_of(find("norm.weight", "model.norm.weight") or "norm.weight")
    if taps:
        weights["join.weight"] = source_of(find("fc.weight", "model.fc.weight") or "fc.weight")
    if own:
        weights["unembed.weight"] = source_of(find("lm_head.weight", "model.lm_head.weight") or "lm_head.weight")
    return HeadConfig(spec=spec, weights=weights, unused=COPIES)


def mtp_head(target: ModelSpec, tensors: Collection[str]) -> HeadConfig:
    """Return the layer for multi-token prediction that a checkpoint of this model holds behind its own. tensors: the
    names in its files; empty where there are none. Raise ModelLoadError if there is no such layer."""
    if target.architecture.startswith(("Qwen3Next", "Qwen3_5")):
        prefix, entry, norms = "mtp.layers.0.", "mtp.fc", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        last, scores, carries = "mtp.norm", "", True
    elif target.architecture.startswith(("Glm4Moe", "DeepseekV3")) and target.unused:
        prefix = target.unused[0]
        entry, norms = f"{prefix}eh_proj", (f"{prefix}enorm", f"{prefix}hnorm")
        last, scores, carries = f"{prefix}shared_head.norm", f"{prefix}shared_head.head.weight", False
    else:
        raise ModelLoadError(
            f"the method mtp is for models whose checkpoints bring a layer for it (Qwen3-Next, Qwen3.5, GLM-4.5, "
            f"DeepSeek-V3), and "
            f"{target.architecture} is none of them; take another method."
        )
    if tensors and f"{entry}.weight" not in tensors:
        raise ModelLoadError(
            f"the checkpoint lacks {entry}.weight, so it came without its layer for mtp; take another method."
        )
    layer = [layer for layer in target.layers if not any(state.exact for state in layer.mixer.states)][-1]
    own = scores in tensors
    spec = DraftHeadSpec(
        width=target.hidden_size,
        layers=(layer,),
        entry_norm=target.final_norm,
        final_norm=target.final_norm,
        carries_norm=carries,
        scored=target.vocab_size if own else 0,
    )
    found = ARCHITECTURES[target.architecture].weights(replace(target, layers=(layer,)))

    def renamed(source: Source) -> Source:
        return replace(source, name=prefix + source.name.partition("layers.0.")[2])

    weights: WeightMap = {
        name: tuple(map(renamed, sources)) for name, sources in found.items() if name.startswith("layers.0.")
    }
    weights["entry.weight"] = source_of(f"{entry}.weight")
    for ours, theirs in zip(("embed_norm", "feature_norm"), norms, strict=True):
        weights[f"{ours}.weight"] = source_of(f"{theirs}.weight")
    weights["final_norm.weight"] = source_of(f"{last}.weight")
    if own:
        weights["unembed.weight"] = source_of(scores)
    return HeadConfig(spec=spec, weights=weights, unused=("",))  # the files are the model's


def _medusa(config: Mapping[str, Any], tensors: Collection[str], target: ModelSpec) -> HeadConfig:
    values = Config({"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, **config})
    for name, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (given := values.integer(name)) != wanted:
            raise ModelLoadError(
                f"the heads' config.json says {name} {given}, and the model has {wanted}; take the heads that were "
                "trained for this model."
            )
    names = Config({**{"medusa_num_layers": 1}, **_renamed(config)})
    heads, blocks = names.integer("medusa_num_heads"), names.integer("medusa_num_layers")
    if max(heads, blocks) > MOST_HEADS:
        raise wrong("medusa_num_heads", max(heads, blocks), f"at most {MOST_HEADS}")
    find = finder(tensors)

    def block(head: int, index: int, kind: str) -> str | None:
        names = f"{head}.{index}.linear.{kind}", f"blocks.{head}.layers.{index}.{kind}"
        return find(*names, *(f"medusa_heads.{name}" for name in names))

    def scores(head: int) -> str | None:
        names = f"{head}.{blocks}.weight", f"lm_heads.{head}.weight"
        return find(*names, *(f"medusa_heads.{name}" for name in names))

    bias, own = bool(block(0, 0, "bias")), bool(scores(0)) and not values.boolean("original_lm_head")
    weights: WeightMap = {}
    for head in range(heads):
        for index in range(blocks):
            for kind in ("weight", "bias") if bias else ("weight",):
                theirs = block(head, index, kind) or f"{head}.{index}.linear.{kind}"
                weights[f"heads.{head}.blocks.{index}.{kind}"] = source_of(theirs)
        if own:
            weights[f"heads.{head}.unembed.weight"] = source_of(scores(head) or f"{head}.{blocks}.weight")
    spec = MedusaSpec(
        width=target.hidden_size, heads=heads, blocks=blocks, bias=bias, scored=target.vocab_size if own else 0
    )
    return HeadConfig(spec=spec, weights=weights, unused=("lm_head.", "lm_heads."))


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the original names of its numbers, which vLLM calls num_heads and num_hidden_layers."""
    theirs = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
    return {theirs.get(name, name): value for name, value in config.items()}


def _llama(config: Mapping[str, Any], tensors: Collection[str]) -> ModelSpec:
    """Return the head's layers, as those of a model."""
    biased = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    values = Config(config, DEFAULTS | {"num_hidden_layers": 1, "vocab_size": 1})
    base = llama_like("a head", values, attention_bias=biased)
    if biased and not any(name.endswith("self_attn.o_proj.bias") for name in tensors):
        base = replace(base, layers=tuple(map(_without_out_bias, base.layers)))
    return base


def _without_out_bias(layer: LayerSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, out_bias=False))


def layer_weights(base: ModelSpec, stored: Callable[[str], str]) -> WeightMap:
    """Return the weight map of a head's layers. stored: gives the name in the files for one as layers.0.…"""
    found = {name: sources for name, sources in Llama.weights(base).items() if name.startswith("layers.")}
    return {
        name: tuple(replace(source, name=stored(source.name.removeprefix("model."))) for source in sources)
        for name, sources in found.items()
    }


def _taps(config: Config, layers: int) -> tuple[int, ...]:
    """Return the target's layers behind which an EAGLE-3 head taps it. SGLang's configs name these layers, and those of
    vLLM's speculators the ones behind them."""
    section, name = config.section("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    if section.raw("use_aux_hidden_state") is False:
        return ()
    if (given := section.raw(name)) is None:
        given = config.raw(name)
        given = [each - 1 if type(each) is int else each for each in given] if isinstance(given, list) else given
    return checked_taps([1, layers // 2 - 1, layers - 4] if given is None else given, name, layers)


def checked_taps(taps: object, name: str, layers: int) -> tuple[int, ...]:
    """Return the layers that a head taps. Raise ModelLoadError if the entry `name` gives others than the model has."""
    whole = isinstance(taps, list) and all(isinstance(tap, int) and not isinstance(tap, bool) for tap in taps)
    if (
        not isinstance(taps, list)
        or not whole
        or not taps
        or sorted(set(taps)) != taps
        or not 0 <= taps[0] <= taps[-1] < layers
    ):
        raise ModelLoadError(
            f"the head taps the layers {repr(taps)[:80]}, and the model has {layers}; {name} of its config.json must "
            "name some of them, in their order."
        )
    return tuple(taps)


def finder(tensors: Collection[str]) -> Callable[..., str | None]:
    """Return a function that gives the first of some names that the files hold, or None."""
    return lambda *names: next((name for name in names if name in tensors), None)


def source_of(name: str) -> tuple[Source]:
    return (Source(name=name),)
