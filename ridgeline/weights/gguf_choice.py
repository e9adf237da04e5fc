"""The choice of one GGUF file among those of a folder: a repository has one for each quantization."""

from __future__ import annotations

import re
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


def tag_patterns(tag: str) -> list[str]:
    """Return the shell patterns of files that have this tag, for the hub's client."""
    spelled = dict.fromkeys((tag, tag.lower(), tag.upper()))
    return [f"*{each}{part}.{end}" for each in spelled for part in ("", "-*-of-*") for end in ("gguf", "GGUF")]


def chosen_gguf(folder: Path, tag: str | None) -> Path | None:
    """Return the GGUF file of a folder with this tag, or the only one; of a model in parts, the first part. Return None
    if there is none in the folder, nor one level below. Raise ModelLoadError if the choice is open."""
    found = _models(folder)
    if not found:
        return None
    names = {path: _PART.sub("", path.relative_to(folder).with_suffix("").as_posix()) for path in found}
    if tag is None:
        if len(found) == 1:
            return found[0]
        raise ModelLoadError(f"{folder} holds {len(found)} GGUF models; name one as in {_example(folder, names)}.")
    ends = re.compile(rf"(?:^|[-./]|_(?=[A-Z]+\d)){re.escape(tag)}$", re.IGNORECASE)
    fitting = sorted((path for path in found if ends.search(names[path])), key=lambda path: (len(names[path]), path))
    if not fitting:
        raise ModelLoadError(f"{folder} holds no GGUF model whose name ends in {tag!r}; it has {_listed(names)}.")
    return fitting[0]  # Q4_K_M, and not UD-Q4_K_M, which has a longer tag to be named by


def _models(folder: Path) -> list[Path]:
    entries = chain(folder.iterdir(), *(each.iterdir() for each in _folders(folder)))
    files = [each for each in islice(entries, _MOST) if is_gguf(each) and not _BESIDE.search(each.name)]
    return sorted({gguf_parts(each)[0] for each in files if each.is_file()})


def _folders(folder: Path) -> list[Path]:
    return sorted(each for each in islice(folder.iterdir(), _MOST) if each.is_dir() and not each.name.startswith("."))


def _example(folder: Path, names: dict[Path, str]) -> str:
    """Return the words for a choice: how one is named, and which there are."""
    first = next(iter(names.values())).replace("/", "-")
    return f"{folder}:{re.split('[-.]', first)[-1]} (it has {_listed(names)})"


def _listed(names: dict[Path, str]) -> str:
    found = sorted(set(names.values()))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
