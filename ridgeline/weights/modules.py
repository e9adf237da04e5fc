"""The files that sentence-transformers keeps beside a model: which modules run, with which settings. This needs no
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.models.pooling import DenseModule, Modules
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import bounded_text, read_json

_SETTINGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


def read_modules(folder: Path) -> Modules | None:
    """Return the modules of a folder, or None if it has none. Raise ModelLoadError for modules that do not run here."""
    listed = _listed(folder)
    if listed is None:
        return None
    pooling: Mapping[str, Any] | None = None
    dense: list[DenseModule] = []
    normalize, longest = False, None
    for kind, path in listed:
        match kind:
            case "Transformer":
                if path not in ("", "."):
                    raise ModelLoadError(f"{folder} keeps its transformer in {path}; give that folder.")
                longest = _longest(folder)
            case "Pooling":
                pooling = read_json(folder / path / "config.json", required=True)
            case "Dense":
                dense.append(
                    DenseModule(prefix=f"{path}/", config=read_json(folder / path / "config.json", required=True))
                )
            case "Normalize":
                normalize = True
            case "Dropout":
                pass
            case _:
                raise ModelLoadError(f"{folder} has a module of the kind {kind!r}, which does not run here.")
    return Modules(pooling=pooling, dense=tuple(dense), normalize=normalize, max_tokens=longest)


def module_folders(folder: Path) -> list[str]:
    """Return the names of the folders with tensors of their own."""
    return [path for kind, path in _listed(folder) or () if kind == "Dense"]


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the texts that go before others by the name of their use, and the name of the one that goes before all if
    no other is named."""
    config = {} if is_gguf(folder) else read_json(folder / "config_sentence_transformers.json")
    prompts = config.get("prompts")
    found = (
        {str(name): text for name, text in prompts.items() if isinstance(text, str)}
        if isinstance(prompts, dict)
        else {}
    )
    default = config.get("default_prompt_name")
    return found, default if isinstance(default, str) and default in found else None


def token_id(folder: Path, text: str) -> int | None:
    """Return the id of a token by its text, or None."""
    model = read_json(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else read_json(folder / "vocab.json")
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if isinstance(found, int) else None


def _listed(folder: Path) -> list[tuple[str, str]] | None:
    """Return the kind and the place of each module in order, or None without any."""
    path = folder / "modules.json"
    if is_gguf(folder) or not path.exists():
        return None
    try:
        modules = json.loads(bounded_text(path))
        found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again from the model's source.") from error
    for _, place in found:
        if place.startswith("/") or ".." in Path(place).parts:
            raise ModelLoadError(f"{path} names {place[:80]!r}, which lies outside of the model's folder.")
    return found


def _longest(folder: Path) -> int | None:
    """Return `max_seq_length`, the tokens to which sentence-transformers cuts its inputs."""
    for name in _SETTINGS:
        value = read_json(folder / name).get("max_seq_length")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
