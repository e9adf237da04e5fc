"""Models of the hub of Hugging Face, and one sentence for each way in which one cannot be had."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.gguf_choice import tag_of

EXAMPLE = "Qwen/Qwen3-0.6B"
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"{_PART}(?:/{_PART})?")
_REASONS = {  # by the names of the hub client's errors, which share no base class across its versions
    "GatedRepoError": "its owner wants terms to be accepted on the hub's page first, and HF_TOKEN to be set",
    "RevisionNotFoundError": "it has no revision of that name",
    "RepositoryNotFoundError": "the hub has no such model, or it is private and HF_TOKEN is not set",
    "EntryNotFoundError": "it has no config.json",
    "OfflineModeIsEnabled": "the hub may not be asked (HF_HUB_OFFLINE), and no copy is on this machine",
    "LocalEntryNotFoundError": "the hub cannot be reached, and no copy is on this machine",
    "ConnectionError": "the hub cannot be reached, and no copy is on this machine",
}


def is_hub_id(model: str) -> bool:
    """Return True for what could be a model's name on the hub: NAME or OWNER/NAME, with or without a tag behind it."""
    name, _ = tag_of(model)
    return bool(_ID.fullmatch(name)) and ".." not in name and "--" not in name


def fetched(model: str, fetch: Callable[..., Any], **arguments: Any) -> Path:
    """Return the place of what `fetch(model, …)`, a function of the hub's client, brings. Raise ModelLoadError."""
    if not is_hub_id(model):
        raise ModelLoadError(
            f"the folder {model!r} does not exist{_near(model)}; give one that holds config.json, or a hub id such as "
            f"{EXAMPLE}."
        )
    try:
        return Path(fetch(model, **arguments))
    except Exception as error:
        raise ModelLoadError(
            f"no folder is named {model!r}{_near(model)}, and as a hub id it cannot be had: {_reason(error)}. Give a "
            f"folder that holds config.json, or a hub id such as {EXAMPLE}."
        ) from error


def _near(model: str) -> str:
    """Return a hint at a folder beside the missing one whose name is much like its name."""
    path = Path(model).expanduser()
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir() or is_gguf(each)]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, 1, 0.8)
    return f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""


def _reason(error: Exception) -> str:
    for kind in type(error).__mro__:
        if kind.__name__ in _REASONS:
            return _REASONS[kind.__name__]
    if isinstance(error, OSError) and error.strerror and error.filename:  # no space, no rights
        return f"{error.filename}: {error.strerror} (--download-dir names another folder)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (--download-dir names another folder)"
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
