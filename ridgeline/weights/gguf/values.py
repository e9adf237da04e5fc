"""The values of a GGUF file that describe its architecture."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.models.config import MAX_COUNTS
from ridgeline.weights.formats.gguf_file import GGUF


class Values:
    """The architecture's own values in a file: `values["block_count"]` is "llama.block_count".

    asked: the names of the values that were asked for.
    """

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.architecture = gguf, gguf.values.get("general.architecture")
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. One that is given per layer counts only if all layers have the same."""
        self.asked.add(name)
        value = self.raw(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def raw(self, name: str, default: Any = None) -> Any:
        """Return a value as the file has it."""
        return self.gguf.values.get(f"{self.architecture}.{name}", default)

    def refuse_unless(self, name: str, *usual: float) -> None:
        """Raise ModelLoadError if the file sets this value to something else than `usual`."""
        value = self.get(name)
        near = isinstance(value, int | float) and any(abs(value - each) <= 1e-5 * abs(each) for each in usual)
        if value is not None and not near:
            raise self.wrong(name, value, f"only {' or '.join(str(each) for each in usual)} runs here")

    def wrong(self, name: str, value: Any, words: str) -> ModelLoadError:
        return ModelLoadError(f"{self.gguf.path} sets {self.architecture}.{name} to {repr(value)[:80]}; {words}.")

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(f"{self.gguf.path} has no {self.architecture}.{name}; the model needs it.")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a number that we calculate with, at least 1. Raise ModelLoadError."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, value, "it must be a whole number of at least 1, so download the file again")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number that we calculate with. Raise ModelLoadError."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(name, value, "it must be a number, so download the file again")
        return value

    @property
    def blocks(self) -> int:
        """The number of layers, with those that draft."""
        count, most = self.whole("block_count"), MAX_COUNTS["num_hidden_layers"]
        if count > most:
            raise self.wrong("block_count", count, f"at most {most} layers run here, so download the file again")
        return count

    @property
    def head_dim(self) -> int:
        return self.whole("attention.key_length", max(1, self.shared_width))

    @property
    def shared_width(self) -> int:
        return self.whole("embedding_length") // self.most("attention.head_count")

    @property
    def layers(self) -> int:
        """The number of layers, without those behind them that draft."""
        return self.blocks - self.drafting

    @property
    def drafting(self) -> int:
        """The number of layers that draft further tokens, which come last."""
        count = self.get("nextn_predict_layers", 0)
        return count if isinstance(count, int) and 0 <= count < self.blocks else 0

    def has(self, name: str, layer: int | None = 0) -> bool:
        """Return True if the file holds a tensor of a layer (None: of any layer)."""
        tensors = self.gguf.tensors
        return any(f"blk.{i}.{name}" in tensors for i in (range(self.layers) if layer is None else (layer,)))

    def first_with(self, name: str) -> int:
        """Return the first layer of which the file holds this tensor, or the number of layers."""
        return next((layer for layer in range(self.layers) if self.has(name, layer)), self.layers)

    def kinds(self, name: str, present: str, absent: str) -> list[str]:
        """Return a word for each layer, by whether the file holds this tensor of it."""
        return [present if self.has(name, layer) else absent for layer in range(self.layers)]

    def most(self, name: str, default: int | None = None) -> int:
        """Return the largest of a value's numbers, where layers have their own."""
        value = self.get(name, default)
        if isinstance(value, list) and all(isinstance(each, int) for each in value) and max(value, default=0) > 0:
            return max(value)
        return self.whole(name, default)
