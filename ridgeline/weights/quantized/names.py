"""The names by which a quantization config means modules of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ridgeline.core.errors import ModelLoadError


def pattern(text: str) -> re.Pattern[str]:
    """Return a config's regular expression. Raise ModelLoadError if it is none."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"config.json has {text[:80]!r} in its quantization config, which is no regular expression ({error})."
        ) from error


def matches(name: str, target: str) -> bool:
    """Return True if a target of compressed-tensors means the module: "re:" and a regular expression from the name's
    beginning, or the name itself."""
    if target.startswith("re:"):
        return pattern(target[3:]).match(name) is not None
    return name == target


def among(name: str, skipped: Iterable[str]) -> bool:
    """Return True if a list of modules that are not converted means this one: its name, a part of it between dots (or
    the beginning of one), or a pattern with stars or as a regular expression."""
    return any(_means(each, name) for each in skipped)


def _means(skipped: str, name: str) -> bool:
    if skipped.startswith("re:"):
        return matches(name, skipped)
    if "*" in skipped:
        glob = re.escape(skipped).replace(r"\*", ".*")
        return re.fullmatch(rf"{glob}(\..*)?", name) is not None
    return re.search(rf"(^|\.){re.escape(skipped)}($|\.)", name) is not None
