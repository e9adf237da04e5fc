"""The sliding windows of a GGUF file's layers."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.values import Values


def sliding(values: Values, every: int | None = None) -> list[bool] | None:
    """Return which layers have a window, by the file's list or by its period, of which the last layer has none; None if
    it says nothing. every: the period of a family whose files may leave it out. Raise ModelLoadError."""
    pattern = values.raw(name := "attention.sliding_window_pattern", every)
    if isinstance(pattern, list) and len(pattern) == values.blocks and all(each in (0, 1) for each in pattern):
        return [bool(each) for each in pattern[: values.layers]]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return [(layer + 1) % pattern > 0 for layer in range(values.layers)]
    if pattern is None:
        return None
    raise values.wrong(name, pattern, "it must be a whole number of at least 1, or yes or no for each layer")


def windows(values: Values, every: int) -> dict[str, Any]:
    """Return the entries of layers with and without a window. every: the period of those without, if the file does not
    say it."""
    kinds = sliding(values, every) or []
    return {
        "sliding_window": values["attention.sliding_window"],
        "layer_types": ["sliding_attention" if each else "full_attention" for each in kinds],
    }
