"""The sliding windows of a model's layers: as its config lists them, or by a rule of its family."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config


def pattern_windows(config: Config, every: int | None = None) -> list[int | None]:
    """Return each layer's window: as `layer_types` says, or on all but one layer in `every` (default: as
    `sliding_window_pattern` says)."""
    window, types = _window(config), config.layer_types(config.integer("num_hidden_layers"))
    if types is not None:
        return listed_windows(types, window)
    every = config.integer("sliding_window_pattern") if every is None else every
    return [window if (layer + 1) % every else None for layer in range(config.integer("num_hidden_layers"))]


def later_windows(config: Config) -> list[int | None]:
    """Return each layer's window: as `layer_types` says, or on the layers from `max_window_layers` on."""
    window, types = _window(config), config.layer_types(config.integer("num_hidden_layers"))
    if types is not None:
        return listed_windows(types, window)
    first = config.integer("max_window_layers", at_least=0)
    return [window if layer >= first else None for layer in range(config.integer("num_hidden_layers"))]


def listed_windows(types: list[str], window: int | None) -> list[int | None]:
    """Return the window of the layers whose type has one."""
    return [window if kind == "sliding_attention" else None for kind in types]


def unrotated_without_window(spec: ModelSpec) -> ModelSpec:
    """Return the model with no rotation on layers that see everything."""
    layers = (
        layer if layer.attention.window is not None else replace(layer, mixer=replace(layer.attention, rope=None))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _window(config: Config) -> int | None:
    return config.integer("sliding_window") if "sliding_window" in config else None
