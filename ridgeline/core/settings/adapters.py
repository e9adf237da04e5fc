"""Settings of adapters (LoRA) that requests may name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Settings

MOST_RANK = 512  # the largest that is in use has 256
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
FILES = CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATES = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json", "chat_template.json"
GRAMMAR = (
    "a name has up to 128 letters, digits, dots, dashes, underscores, colons and slashes, and begins with a letter or "
    "digit"
)
MOST_LORAS = 1024  # a table of so many is looked through by every program of the kernels


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter of a server: clients name it as they name a model.

    path: its folder.
    parent: the name of its model, as the operator gave it; "": none was given.
    """

    name: str
    path: str
    parent: str = ""


def named_adapters(words: Iterable[str], models: Iterable[str]) -> tuple[NamedAdapter, ...]:
    """Return the adapters of `--lora-modules`, each as NAME=FOLDER, or as a JSON object with name, path and maybe
    base_model_name. models: names that are taken. Raise InvalidConfig."""
    found, taken = list[NamedAdapter](), set(models)
    for word in words:
        each = _named(word)
        if NAME.fullmatch(each.name) is None:
            raise InvalidConfig(f"lora_modules has the name {each.name[:80]!r}; {GRAMMAR}.")
        if each.name in taken:
            raise InvalidConfig(f"lora_modules gives an adapter the name {each.name!r}, which is taken; rename it.")
        if each.parent and each.parent not in models:
            raise InvalidConfig(f"lora_modules has base_model_name {each.parent[:80]!r}, which no model here has.")
        taken.add(each.name)
        found.append(each)
    return tuple(found)


def _named(word: str) -> NamedAdapter:
    name, equals, path = word.partition("=")
    if not word.lstrip().startswith("{"):
        if not (equals and path):
            raise InvalidConfig(f"lora_modules takes NAME=FOLDER or a JSON object, got {word[:80]!r}.")
        return NamedAdapter(name, path)
    try:
        given = json.loads(word)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"lora_modules has a JSON object that is none: {word[:80]!r}.") from error
    known = {"name", "path", "base_model_name"}
    if unknown := sorted(given.keys() - known):
        raise InvalidConfig(f"lora_modules has an object with {unknown[0][:80]!r}; use name, path, base_model_name.")
    values = [given.get(key) for key in ("name", "path")]
    parent = given.get("base_model_name") or ""
    if not all(isinstance(each, str) and each for each in values) or not isinstance(parent, str):
        raise InvalidConfig(f"lora_modules needs name and path as texts, got {word[:80]!r}.")
    return NamedAdapter(str(values[0]), str(values[1]), parent)


def gguf_adapter(path: Path) -> Path | None:
    """Return the GGUF file of an adapter: the path itself, or the only such file in a folder without PEFT's files."""
    if _is_gguf(path):
        return path
    if not path.is_dir() or (path / CONFIG).exists():
        return None
    found = [each for each in sorted(path.iterdir())[:64] if _is_gguf(each)]
    return found[0] if len(found) == 1 else None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    """Adapters that requests may name.

    enable_lora: requests may run with adapters, each with its own.
    max_loras: with how many adapters requests run at once: the device has memory for so many. Requests with further
        ones wait.
    max_lora_rank: the largest rank of an adapter, for which the device has memory.
    max_cpu_loras: how many adapters the host's memory holds. Others are read from their folders when they are needed.
        None: all that were loaded.
    max_cpu_lora_bytes: how many bytes their matrices take there, on all ranks together. The adapter that was used last
        stays even if it is larger. None: any number.
    enable_lora_factors: adapters may be IA3 or DoRA too. Steps with adapters then multiply what linear maps get and
        give.
    enable_lora_vocabulary: adapters may change the table of the tokens and the output layer too, by products, and by
        rows of single tokens.
    enable_lora_tables: adapters may have both whole, in place of the model's. The device then has memory for such
        tables of each place.
    enable_lora_experts: adapters may change mixtures' experts too. The device then has memory for matrices of every
        expert and adapter.
    enable_tower_connector_lora: adapters may change towers of pictures, listeners, and their projectors too. Vectors of
        pictures and sounds are then kept for each adapter apart.
    """

    enable_lora: bool = False
    max_loras: Annotated[int, AtLeast(1)] = 1
    max_lora_rank: Annotated[int, AtLeast(1)] = 16
    max_cpu_loras: Annotated[int | None, AtLeast(1)] = None
    max_cpu_lora_bytes: Annotated[int | None, AtLeast(1)] = None
    enable_lora_factors: bool = False
    enable_lora_vocabulary: bool = False
    enable_lora_tables: bool = False
    enable_lora_experts: bool = False
    enable_tower_connector_lora: bool = False

    def check(self) -> None:
        if self.max_lora_rank > MOST_RANK:
            raise InvalidConfig(f"max_lora_rank must be at most {MOST_RANK}, got {self.max_lora_rank}.")
        if self.max_loras > MOST_LORAS:
            raise InvalidConfig(f"max_loras must be at most {MOST_LORAS}, got {self.max_loras}.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise InvalidConfig(
                f"max_cpu_loras is {self.max_cpu_loras}, below max_loras {self.max_loras}; the host's memory holds all "
                "that the device does."
            )
