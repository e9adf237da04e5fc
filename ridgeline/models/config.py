"""The reader of a checkpoint's config.json. Every value is checked when it is read, and what we cannot run is refused.

A missing entry takes the default that Hugging Face gives it. The architecture files list those defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Protocol

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.model import DTYPES
from ridgeline.core.specs.model import ModelSpec, WeightMap

Activation = Literal["silu", "gelu", "gelu_tanh"]
Ungated = Literal[Activation, "quick_gelu", "relu", "relu2"]  # of feed-forwards without a gate

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

UNGATED: dict[str, Ungated] = {**ACTIVATIONS, "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2"}

MAX_NUMBER = 3.4e38  # the largest number of float32
MAX_INTEGER = 2**24  # far above any real width, vocabulary or context, and no product of a few overflows a size
MAX_COUNTS = {  # things that are built one by one: some ten times as many as any model has
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "num_blocks"), 1000),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1000),
    **dict.fromkeys(("num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 4096),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_modules"), 1000),
    **dict.fromkeys(("mamba_expand", "expand"), 256),  # a factor of a width
}

LAYER_TYPES = ("full_attention", "sliding_attention")

# The sampling defaults that a checkpoint may bring, under the names that `SamplingParams` uses.
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The contents of a model folder's config files.

    `dtype` is one of core's DTYPES (float32 if the checkpoint does not say, as in Hugging Face). Any of `eos_token_ids`
    ends a request. `sampling_defaults` are what generation_config.json sets among SAMPLING_DEFAULTS.

    foreign: config.json as text, if the model runs through transformers' modules (`ridgeline/foreign`).
    """

    spec: ModelSpec
    weights: WeightMap
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]
    foreign: str | None = None


class Architecture(Protocol):
    """The interface of an architecture's file. Most are classes with static methods."""

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return config.json as a network. Raise ModelLoadError for values that we cannot run."""

    def weights(self, spec: ModelSpec) -> WeightMap:
        """Return the checkpoint's tensors that fill each parameter of the decoder."""


class Config:
    """A config.json dictionary, or one nested in it, with checked access. Wrong values raise ModelLoadError.

    An absent entry and a null one are the same, except that a null hides the default.

    spellings: the names that this family's files give to some entries, by the names that these are read by. Sentences
        about a wrong value have the file's.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        self._spellings = {name: spelling for name, spelling in (spellings or {}).items() if spelling in values}
        spelled = {name: values[spelling] for name, spelling in self._spellings.items()}
        self._values = {**(defaults or {}), **values, **spelled}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    @property
    def entries(self) -> Mapping[str, Any]:
        """All entries, as they are."""
        return self._values

    def changed(self, **values: Any) -> Config:
        """Return the same dictionary with other values in some entries."""
        found = Config({**self._values, **values})
        found._spellings = self._spellings
        return found

    def filled(self, defaults: Mapping[str, Any]) -> Config:
        """Return the dictionary with defaults for entries that are absent or null."""
        return Config({**defaults, **{name: value for name, value in self._values.items() if value is not None}})

    def wrong(self, name: str, value: object, want: str) -> ModelLoadError:
        """Return the error that an entry has this value, under the name that the file has for it."""
        return wrong(self.spelled(name), value, want)

    def spelled(self, name: str) -> str:
        """Return the name that the file has for an entry."""
        return self._spellings.get(name, name)

    def integer(self, name: str, at_least: int = 1) -> int:
        value, at_most = self._required(name), MAX_COUNTS.get(name, MAX_INTEGER)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise self.wrong(name, value, f"a whole number of at least {at_least} and at most {at_most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0, or `default` if there is none."""
        value = self._required(name) if default is None else self._values.get(name, default)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(name, value, "a number above 0 that float32 can hold")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers above 0."""
        value = self._required(name)
        if not isinstance(value, list) or len(value) != count:
            raise wrong(name, value, f"a list of {count} numbers")
        return tuple(Config({name: item}).number(name) for item in value)

    def bounds(self, name: str) -> tuple[float, float]:
        """Return two numbers, a lower bound of at least 0 and an upper one above it. The upper one may be infinite,
        which transformers writes in words. Without an entry they bound nothing."""
        value = self._values.get(name)
        found = [_infinite(each) for each in value] if isinstance(value, (list, tuple)) else [0.0, inf]
        good = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in found)
        if (value is not None and not isinstance(value, (list, tuple))) or not good or len(found) != 2:
            raise wrong(name, value, "a list of two numbers")
        if not 0 <= found[0] < found[1]:
            raise wrong(name, value, "a number of at least 0 and a larger one")
        return float(found[0]), float(found[1])

    def activation(self, name: str) -> Activation:
        return ACTIVATIONS[self._activation(name, ACTIVATIONS)]

    def ungated_activation(self, name: str) -> Ungated:
        """Return the activation of a feed-forward without a gate."""
        return UNGATED[self._activation(name, UNGATED)]

    def _activation(self, name: str, known: Collection[str]) -> str:
        value = self._required(name)
        if not isinstance(value, str) or value not in known:
            raise wrong(name, value, f"an activation we support ({', '.join(sorted(known))})")
        return value

    def section(self, name: str, required: bool = False) -> Config:
        """Return the dictionary under `name`, which is empty if there is none and none is required."""
        value = self._required(name) if required else self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise wrong(name, value, "an object")
        return Config(value)

    def layer_types(self, num_layers: int, kinds: Sequence[str] = LAYER_TYPES) -> list[str] | None:
        """Return one of `kinds` for each layer, or None if the checkpoint does not say."""
        types = self._values.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in kinds for kind in types):
            raise wrong("layer_types", types, f"{num_layers} entries, each {' or '.join(kinds)}")
        return types

    def refuse(self, name: str, why: str) -> None:
        """Raise ModelLoadError if `name` is set to anything but null, false or empty."""
        if self._values.get(name):
            raise ModelLoadError(f"config.json sets {name} to {self._values[name]!r}, which is not supported: {why}.")

    def _required(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise ModelLoadError(f"config.json has no {self.spelled(name)}; the model cannot be built without it.")
        return value


def _infinite(value: Any) -> Any:
    return inf if value == {"__float__": "Infinity"} else value


def wrong(name: str, value: object, want: str) -> ModelLoadError:
    return ModelLoadError(f"config.json sets {name} to {repr(value)[:80]}; it must be {want}.")


def head_width(config: Config, width: str, heads: str) -> int:
    """Return the width of each of the heads that share the model's width, from the entries with these names.

    Raise ModelLoadError if it is not a whole number.
    """
    total, count = config.integer(width), config.integer(heads)
    if total % count:
        raise ModelLoadError(f"config.json has {width} {total}, which its {count} heads do not divide; see {heads}.")
    return total // count


def check_colors(config: Config, name: str = "num_channels") -> None:
    """Raise ModelLoadError for a tower whose pictures have another number of colors than 3."""
    if (count := config.integer(name)) != 3:
        raise config.wrong(name, count, "3, as pictures have red, green and blue")


def checkpoint_dtype(config: Config) -> str:
    """Return `dtype`, or `torch_dtype` as it was called before."""
    value = config.raw("dtype") or config.raw("torch_dtype") or "float32"
    if value not in DTYPES:
        raise wrong("dtype", value, f"one of {', '.join(DTYPES)}")
    return value


def token_ids(config: Config, name: str) -> tuple[int, ...]:
    """Return the ids, which are written as one number, a list, or null."""
    value = config.raw(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise wrong(name, value, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def sampling_defaults(generation: Config) -> dict[str, float]:
    """Return the numbers among SAMPLING_DEFAULTS that generation_config.json sets."""
    found = {name: generation.raw(name) for name in SAMPLING_DEFAULTS if name in generation}
    for name, value in found.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelLoadError(f"generation_config.json sets {name} to {value!r}; it must be a number.")
    return found
