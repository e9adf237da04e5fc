"""Heads that draft a block of tokens at once (DFlash, DSpark), from the config.json and the names of the tensors.

The published files have three forms: z-lab's with `dflash_config`, DeepSpec's with the same entries at the top, and
that of vLLM's speculators, whose layers are counted from 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.speculation import DSPARK
from ridgeline.core.specs.draft_head import ConfidenceSpec, DraftBlockSpec, HeadConfig, MarkovSpec
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.draft_heads import COPIES, checked_taps, finder, layer_weights, merged, source_of
from ridgeline.models.llama import llama_like
from ridgeline.models.qwen3 import DEFAULTS

LONGEST_BLOCK = 64  # as many tokens as see each other in a pass
MARKOV_TENSORS: dict[Literal["vanilla", "gated", "rnn"], tuple[str, ...]] = {
    "vanilla": ("markov_w1.weight", "markov_w2.weight"),
    "gated": ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias"),
    "rnn": ("markov_w1.weight", "markov_w2.weight", "joint_proj.weight", "joint_proj.bias"),
}


def read_block_head(method: str, config: Mapping[str, Any], tensors: Collection[str], target: ModelSpec) -> HeadConfig:
    """Return the head of a checkpoint. tensors: as in `models.draft_heads.read_head`. Raise ModelLoadError for values
    that cannot be run."""
    values = merged(config, target)
    own = Config({**values, **Config(values).section("dflash_config").entries})
    find = finder(tensors)
    base = _layers(own, tensors)
    shifted = _shifted(method, own)
    block = own.integer("block_size")
    if not 2 - shifted <= block <= LONGEST_BLOCK:
        raise wrong("block_size", block, f"{2 - shifted} to {LONGEST_BLOCK}")
    mask = own.integer("mask_token_id", at_least=0)
    if mask >= target.vocab_size:
        raise wrong("mask_token_id", mask, f"one of the model's {target.vocab_size} tokens")
    frozen = "DSpark" in _architecture(own)  # DeepSpec's trainer copies the target's matrices and leaves them alone
    scored = own.integer("draft_vocab_size") if "draft_vocab_size" in own else target.vocab_size
    narrow = scored != target.vocab_size
    stored = find("lm_head.weight", "model.lm_head.weight")
    unembeds = narrow or (stored is not None and not frozen)
    markov = _markov(own, tensors)
    if narrow and (scored > target.vocab_size or markov is not None or (tensors and "d2t" not in tensors)):
        raise wrong("draft_vocab_size", scored, f"{target.vocab_size}, or fewer with the tensor d2t and no Markov head")
    own_mask = find("mask_embedding", "model.mask_embedding", "mask_embedding.weight")
    confidence = _confidence(own, tensors, markov)
    spec = DraftBlockSpec(
        width=base.hidden_size,
        layers=base.layers,
        taps=_taps(own, target, len(base.layers)),
        block=block,
        mask=mask,
        context_norm=base.final_norm,
        final_norm=base.final_norm,
        own_mask=own_mask is not None,
        shifted=shifted,
        causal=_causal(own, base),
        embed_scale=target.embedding_multiplier,
        markov=markov,
        confidence=confidence,
        scored=scored if unembeds else 0,
        narrow=narrow,
    )
    weights: WeightMap = layer_weights(base, lambda name: find(name, f"model.{name}") or name)
    for ours, theirs in {"join": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}.items():
        weights[f"{ours}.weight"] = source_of(find(f"{theirs}.weight", f"model.{theirs}.weight") or f"{theirs}.weight")
    if own_mask is not None:
        weights["mask_M"] = source_of(own_mask)
    if unembeds:
        weights["unembed.weight"] = source_of(stored or "lm_head.weight")
    if markov is not None:
        for name in MARKOV_TENSORS[markov.kind]:
            weights[f"markov.{name.removeprefix('markov_')}"] = source_of(f"markov_head.{name}")
    if confidence is not None:
        for name in ("weight", "bias") if confidence.bias else ("weight",):
            weights[f"confidence.{name}"] = source_of(f"confidence_head.proj.{name}")
    unused = (*COPIES, "confidence_head.", *(() if unembeds else ("lm_head.", "model.lm_head.")))
    return HeadConfig(spec=spec, weights=weights, unused=unused)


def _layers(own: Config, tensors: Collection[str]) -> ModelSpec:
    """Return the head's layers, as those of a model."""

    def there(end: str) -> bool:
        return any(name.endswith(f"self_attn.{end}") for name in tensors)

    entries = {**DEFAULTS, "num_hidden_layers": 1, **own.entries, "is_causal": None, "vocab_size": 1}
    values = Config(entries)
    base = llama_like(
        "a head",
        values,
        attention_bias=there("q_proj.bias"),
        qk_norm=not tensors or there("q_norm.weight"),
        windows=_windows(values),
    )
    if there("q_proj.bias") and not there("o_proj.bias"):
        layers = (replace(layer, mixer=replace(layer.attention, out_bias=False)) for layer in base.layers)
        base = replace(base, layers=tuple(layers))
    return base


def _windows(own: Config) -> list[int | None]:
    """Return each layer's window: as `layer_types` says, or on all layers where `use_swa` is set."""
    count = own.integer("num_hidden_layers")
    types, all_of_them = own.layer_types(count), own.boolean("use_swa")
    sliding = [kind == "sliding_attention" for kind in types or [""] * count]
    if all_of_them and not any(sliding):
        sliding = [True] * count
    if not any(sliding):
        return [None] * count
    window = own.integer("swa_window_size" if "swa_window_size" in own else "sliding_window")
    return [window if each else None for each in sliding]


def _causal(own: Config, base: ModelSpec) -> Literal["none", "windows", "all"]:
    """Return which layers are causal within a block: those with a window, if `layer_types` names these, unless the
    config says it of all."""
    for name in ("is_causal", "causal"):
        if own.raw(name) is not None:
            return "all" if own.boolean(name) else "none"
    windows = "layer_types" in own and any(kind == "sliding_attention" for kind in own.raw("layer_types"))
    return "windows" if windows else "none"


def _architecture(own: Config) -> str:
    names = own.raw("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def _shifted(method: str, own: Config) -> bool:
    """Return True if a place scores the token behind it, as all heads of DeepSpec do, its DFlash ones too."""
    if own.raw("sample_from_anchor") is not None:
        return own.boolean("sample_from_anchor")
    named = own.raw("speculators_model_type")
    if "DFlash" in _architecture(own) or named == "dflash":
        return False
    return method == DSPARK or named == DSPARK or "DSpark" in _architecture(own)


def _taps(own: Config, target: ModelSpec, layers: int) -> tuple[int, ...]:
    """Return the target's layers whose outputs are joined to the context."""
    name, given = "target_layer_ids", own.raw("target_layer_ids")
    for name_of_later in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        later = own.raw(name_of_later)
        if given is None and isinstance(later, list):
            name, given = name_of_later, [each - 1 if type(each) is int else each for each in later]
    if given is None:
        last = len(target.layers)
        between = [round(1 + index * (last - 4) / max(1, layers - 1)) for index in range(layers)]
        given = [last // 2] if layers == 1 else between
    return checked_taps(given, name, len(target.layers))


def _markov(own: Config, tensors: Collection[str]) -> MarkovSpec | None:
    """Return the Markov head of a checkpoint, or None if it has none."""
    if "markov_rank" not in own or own.raw("markov_rank") == 0:
        return None
    given = own.raw("markov_head_type") or "vanilla"
    if (kind := next((each for each in MARKOV_TENSORS if each == given), None)) is None:
        raise wrong("markov_head_type", given, f"one of {', '.join(MARKOV_TENSORS)}")
    missing = [name for name in MARKOV_TENSORS[kind] if tensors and f"markov_head.{name}" not in tensors]
    if missing:
        raise ModelLoadError(
            f"config.json has markov_rank {own.integer('markov_rank')}, and the files lack markov_head.{missing[0]}; "
            "copy the checkpoint again from its source."
        )
    return MarkovSpec(kind=kind, rank=own.integer("markov_rank"))


def _confidence(own: Config, tensors: Collection[str], markov: MarkovSpec | None) -> ConfidenceSpec | None:
    """Return the confidence head of a checkpoint, or None if it has none."""
    if not own.boolean("enable_confidence_head"):
        return None
    reads = own.boolean("confidence_head_with_markov")
    if reads and markov is None:
        raise wrong("confidence_head_with_markov", True, "false, since the head has no Markov head")
    return ConfidenceSpec(markov=reads, bias=not tensors or "confidence_head.proj.bias" in tensors)
