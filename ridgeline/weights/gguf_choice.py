"""The choice of one GGUF file among those of a folder: a repository has one for each quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.gguf_file import gguf_parts, is_gguf

_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # towers for images, and statistics of a quantizer
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST = 4096  # entries of a folder that are looked at
_SHOWN = 12


def tag_of(model: str) -> tuple[str, str | None]:
    """Return a model without its tag, and the tag: "owner/name:Q4_K_M" is "owner/name" and "Q4_K_M"."""
    named = re.fullmatch(r"(.+):([A-Za-z0-9][\w.-]{0,63})", model)
    return (named[1], named[2]) if named else (model, None)


def tagged_files(names: Iterable[str], tag: str, repository: str) -> list[str]:
    """Return the files of a repository that are the model with this tag: one, its parts, or none without any GGUF file.
    Raise ModelLoadError if no model has the tag."""
    found = _chosen([Path(name) for name in names], tag, repository)
    return [] if found is None else [path.as_posix() for path in gguf_parts(found)]


def chosen_gguf(folder: Path, tag: str | None) -> Path | None:
    """Return the GGUF file of a folder with this tag, or the only one; of a model in parts, the first part. Return None
    if there is none in the folder, nor one level below. Raise ModelLoadError if the choice is open."""
    entries = chain(folder.iterdir(), *(each.iterdir() for each in _folders(folder)))
    files = [each.relative_to(folder) for each in islice(entries, _MOST) if is_gguf(each) and each.is_file()]
    found = _chosen(files, tag, str(folder))
    return None if found is None else folder / found


def _chosen(files: list[Path], tag: str | None, place: str) -> Path | None:
    models = sorted({gguf_parts(each)[0] for each in files if _is_model(each)})
    if not models:
        return None
    names = {path: _PART.sub("", path.with_suffix("").as_posix()) for path in models}
    if tag is None:
        if len(models) == 1:
            return models[0]
        raise ModelLoadError(f"{place} holds {len(models)} GGUF models; name one as in {_example(place, names)}.")
    ends = re.compile(rf"(?:^|[-./]|_(?=[A-Z]+\d)){re.escape(tag)}$", re.IGNORECASE)
    fitting = sorted((path for path in models if ends.search(names[path])), key=lambda path: (len(names[path]), path))
    if not fitting:
        raise ModelLoadError(f"{place} holds no GGUF model whose name ends in {tag!r}; it has {_listed(names)}.")
    return fitting[0]  # Q4_K_M, and not UD-Q4_K_M, which has a longer tag to be named by


def _is_model(file: Path) -> bool:
    """Return True for a name of a model's file, in the folder itself or one level below."""
    shown = len(file.parts) == 1 or (len(file.parts) == 2 and not file.parts[0].startswith("."))
    return shown and is_gguf(file) and not _BESIDE.search(file.name)


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in islice(folder.iterdir(), _MOST) if each.is_dir() and not each.name.startswith("."))


def _example(place: str, names: dict[Path, str]) -> str:
    """Return the words for a choice: how one is named, and which there are."""
    first = next(iter(names.values())).replace("/", "-")
    return f"{place}:{re.split('[-.]', first)[-1]} (it has {_listed(names)})"


def _listed(names: dict[Path, str]) -> str:
    found = sorted(set(names.values()))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
