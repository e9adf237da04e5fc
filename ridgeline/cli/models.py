"""`ridgeline models`: list the architectures that run, or describe the contents of a model folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.core.specs.model import AttentionSpec, ModelSpec, attention_of
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.models.config import ModelConfig

WAYS = {
    False: "Ridgeline",
    True: "transformers, with our attention and cache, on one device; checks at start decide, of graphs too",
}


def models(
    model: str = typer.Argument(None, help="Folder or hub id to describe; without it, the architectures are listed."),
    model_impl: str = typer.Option("auto", help="As `ridgeline serve` has it: auto, ridgeline or transformers."),
    as_json: bool = typer.Option(False, "--json", help="JSON on standard output."),
) -> None:
    """List the architectures that run, or describe one model, and whose layers would run it."""
    record = describe(model, model_impl) if model else list_architectures()
    if as_json:
        print(json.dumps(record))
        return
    table = Table(show_header=False)
    for name, value in record.items():
        table.add_row(name, str(value))
    Console().print(table)


def list_architectures() -> dict[str, str]:
    """Return architecture (as config.json names it) → the families that name it."""
    from ridgeline.models import ARCHITECTURES, descriptions

    found = {name: f"{families}: {what}" for name, (families, what) in descriptions().items()}
    return found | {name: f"a plugin of {package}" for name, package in ARCHITECTURES.added().items()}


def describe(model: str, model_impl: str = "auto") -> dict[str, object]:
    """Return the facts of a model's architecture, from its config alone. Raise ModelLoadError and InvalidConfig."""
    from ridgeline.core.settings.config import LLMConfig
    from ridgeline.defaults import choose_device, choose_dtype
    from ridgeline.weights.loader import read_model_config, resolve_model  # imports torch

    impl = LLMConfig(model=model, model_impl=model_impl).model_impl  # type: ignore[arg-type]  # it checks the word
    config = read_model_config(resolve_model(model), impl=impl)
    spec, device = config.spec, choose_device("auto")
    dtype, why = choose_dtype("auto", config.dtype, device)
    attentions = [found for layer in spec.layers if (found := attention_of(layer.mixer)) is not None]
    return {
        "architecture": spec.architecture,
        "layers of": WAYS[config.foreign is not None],
        "parameters": count_parameters(config),
        **describe_experts(config),
        "dtype": config.dtype,
        "runs in": f"{dtype} on this machine's {device}: {why}",
        **({} if spec.pooling is None else {"pools to": f"{spec.pooling.width} numbers ({spec.pooling.task})"}),
        "layers": len(spec.layers),
        "hidden size": spec.hidden_size,
        **describe_mixers(spec, attentions, config.dtype),
        **describe_tower(spec),
        **describe_listener(spec),
        "vocabulary": spec.vocab_size,
        "context": spec.max_position_embeddings,
        "KV bytes per token": sum(
            state.token_bytes(config.dtype)
            for layer in spec.layers
            for state in layer.mixer.states
            if not (spec.crosses and state.encoded)
        ),
        **({"KV bytes of a picture": seen_bytes(spec, config.dtype)} if spec.crosses else {}),
        "windows": sorted({each.window for each in attentions if each.window is not None}),
        **({"chunks": chunks} if (chunks := sorted({each.chunk for each in attentions if each.chunk})) else {}),
        "end-of-sequence ids": list(config.eos_token_ids),
    }


def seen_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the most bytes of a picture's keys and values in layers of cross attention."""
    states = (state for layer in spec.layers for state in layer.mixer.states if state.encoded)
    return spec.crosses * sum(state.token_bytes(dtype) for state in states)


def describe_tower(spec: ModelSpec) -> dict[str, object]:
    """Return the facts of the tower that sees pictures; empty for a model without one."""
    if (tower := spec.tower) is None:
        return {}
    per_vector = tower.merge**2
    return {
        "tower": f"{len(tower.layers)} layers, {tower.width} wide, {tower.parameters:,} parameters",
        "patches of a vector": per_vector,
    }


def describe_listener(spec: ModelSpec) -> dict[str, object]:
    """Return the facts of the listener that hears sounds; empty for a model without one."""
    if (listener := spec.listener) is None:
        return {}
    layers = len(listener.layers) // max(listener.block, 1)
    return {
        "listener": f"{layers} layers, {listener.width} wide, {listener.parameters:,} parameters",
        "seconds of the longest sound": listener.longest * HOP // RATE,
    }


def describe_mixers(spec: ModelSpec, attentions: Sequence[AttentionSpec], dtype: str) -> dict[str, object]:
    """Return the heads of attention, and the other mixers with the bytes that a request's states have in all layers."""
    found: dict[str, object] = {}
    if attentions:
        first = attentions[0]
        found["heads"] = f"{first.num_heads} query, {first.num_kv_heads} key/value, {first.head_dim} wide"
    kinds = Counter(layer.mixer.kind for layer in spec.layers)
    if set(kinds) - {"attention", "foreign"}:
        found["mixers"] = ", ".join(f"{count} of the kind {kind}" for kind, count in kinds.items())
        states = (state for layer in spec.layers for state in layer.mixer.states if state.exact)
        found["state bytes of a request"] = sum(state.unit_bytes(1, dtype) for state in states)
    return found


def describe_experts(config: ModelConfig) -> dict[str, object]:
    """Return the facts of a mixture of experts; empty for a dense model."""
    from ridgeline.core.specs.experts import ExpertsSpec

    spec = config.spec
    found = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    if not found:
        return {}
    products = [each for layer in spec.layers for each in layer.products(spec.hidden_size).values()]
    idle = sum(max(0, each.copies - each.used) * each.outputs * (each.inputs + each.bias) for each in products)
    counts = sorted({(each.routing.top_k, each.routing.experts) for each in found})
    shared = " and a shared one" if any(each.shared for each in found) else ""
    return {
        "parameters of a token": count_parameters(config) - idle,
        "experts": f"{', '.join(f'{used} of {of}' for used, of in counts)}{shared} in {len(found)} layers",
    }


def count_parameters(config: ModelConfig) -> int:
    """Return the parameters of the network that a config describes, counted on a device that allocates nothing."""
    if config.foreign is not None:
        from ridgeline.foreign.spec import traced_class

        return traced_class(config.foreign)[1].parameters
    from ridgeline.weights.loader import empty_decoder

    return sum(parameter.numel() for parameter in empty_decoder(config.spec).parameters())
