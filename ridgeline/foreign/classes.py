"""The class of transformers that a config.json names. Only classes of the installed package are taken, and nothing is
downloaded: neither code, nor kernels, nor a part of a config."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from ridgeline.core.errors import ModelLoadError
from ridgeline.models.config import MAX_COUNTS, MAX_INTEGER

PACKAGE = "transformers.models."
EXTRA = "pip install 'ridgeline[transformers]'"

# Entries of config.json that say how transformers should load a model, not what it computes
LOADING = frozenset(
    {"auto_map", "custom_pipelines", "name_or_path", "_name_or_path", "transformers_weights", "use_kernels"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "return_dict", "torchscript"}
    | {"experts_implementation", "_experts_implementation", "_experts_implementation_internal", "use_return_dict"}
    | {"output_attentions", "output_hidden_states", "gradient_checkpointing", "output_router_logits", "use_cache"}
)
# Those that change the class's modules or where they run
CHANGING = ("quantization_config", "compression_config", "fusion_config", "kernel_config", "distributed_config")
# Rotations whose angles depend on the longest request of a step
BY_LENGTH = ("dynamic", "longrope", "su")
# Words in the names of entries that count what is built one by one, and the most of it
COUNTED = {"layers": 1000, "blocks": 1000, "heads": 4096}
LONG = frozenset({"rope_theta", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"})

_lock = threading.RLock()


class ForeignClass(NamedTuple):
    """A class of transformers that scores the next token, and its config."""

    model: Any
    config: Any

    @property
    def name(self) -> str:
        return self.model.__name__


def installed() -> bool:
    """Return True if transformers is installed."""
    return find_spec("transformers") is not None


@contextmanager
def offline() -> Iterator[None]:
    """Refuse every request to the hub meanwhile, of this thread and of others. One caller at a time."""
    from huggingface_hub import constants

    with _lock:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars from the terminal meanwhile, since ours tells of loading."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def class_of(config: Mapping[str, Any]) -> ForeignClass:
    """Return the class that a config.json names, with its config. Raise ModelLoadError if the installed package has no
    such class, or if its config cannot be read."""
    name = _name_of(config)
    if not installed():
        raise ModelLoadError(f"{name} could only run through transformers' modules; {EXTRA} to try.")
    values = _harmless(config)
    with offline():
        return ForeignClass(_model_class(name, config), _config(name, values))


def _name_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"config.json names the architectures {repr(names)[:80]}; it must name one.")
    return names[0]


def _model_class(name: str, config: Mapping[str, Any]) -> Any:
    """Return the class with this name, if it is the one that transformers has for such configs."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if name not in ((listed,) if isinstance(listed, str) else listed or ()):
        raise ModelLoadError(
            f"config.json names the architecture {name[:80]!r} of the model_type {repr(kind)[:80]}, which transformers "
            f"{transformers.__version__} does not list among models that write text; `ridgeline models` lists ours."
        )
    found = getattr(transformers, name)
    if not found.__module__.startswith(PACKAGE):
        raise ModelLoadError(f"{name} is not a class of the transformers package, but of {found.__module__}.")
    return found


def _config(name: str, values: dict[str, Any]) -> Any:
    import transformers
    from transformers.models.auto import configuration_auto

    kind = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[values["model_type"]])  # type: ignore[attr-defined]
    if not kind.__module__.startswith(PACKAGE):
        raise ModelLoadError(f"the config of {name} is not a class of the transformers package, but of {kind}.")
    try:
        return kind.from_dict(values)
    except Exception as error:  # whatever a class finds wrong with a stranger's values
        raise ModelLoadError(f"transformers cannot read config.json as {name}'s ({said(error)}).") from error


def _harmless(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that say what the model computes. Raise ModelLoadError for those that we cannot follow."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in LOADING:
            continue
        if key in CHANGING and value:
            raise ModelLoadError(f"config.json has a {key}, and models run through transformers are read as they are.")
        if isinstance(value, int) and not isinstance(value, bool):
            _check_count(key, value)
        if key in ("rope_type", "type") and value in BY_LENGTH:
            raise ModelLoadError(
                f"config.json sets {key} to {value!r}: transformers' angles then depend on the longest request of a "
                "step, so a request's tokens would depend on others'."
            )
        number = _number(value)
        found[key] = _harmless(number) if isinstance(number, Mapping) else number
    return found


def _number(value: Any) -> Any:
    """Return a number that JSON has no form for, which transformers writes as an object, and all else as it is."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return value


def _check_count(key: str, value: int) -> None:
    most = next((most for word, most in COUNTED.items() if word in key), 2**40 if key in LONG else MAX_INTEGER)
    most = MAX_COUNTS.get(key, most)
    if abs(value) > most:
        raise ModelLoadError(f"config.json sets {key} to {str(value)[:40]}; it must be at most {most}.")


def said(error: Exception) -> str:
    """Return an exception of transformers as a part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
