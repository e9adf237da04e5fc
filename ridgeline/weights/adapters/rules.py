"""The rules by which a config means modules: those of PEFT's documentation of target_modules, exclude_modules,
layers_to_transform, rank_pattern and alpha_pattern. It imports nothing of the package, since a process of its own runs
it where expressions are a stranger's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MOST_KEYS, MOST_COMPARED = 256, 1_000_000  # patterns, and pairs of a name and a module, that are compared in place
_PLAIN = re.compile(r"[\w.-]*")


def is_plain(asked: Mapping[str, Any]) -> bool:
    """Return True if no config's comparison can take long: names are listed, patterns are names, and they are few."""
    listed = (asked["all"] or not isinstance(asked["targets"], str)) and not isinstance(asked["excluded"], str)
    keys = (*asked["layer_patterns"], *asked["ranks"], *asked["alphas"])
    names = sum(len(asked[each]) for each in ("targets", "excluded") if not isinstance(asked[each], str))
    few = len(keys) <= MOST_KEYS and (names + 8 * len(keys)) * len(asked["modules"]) <= MOST_COMPARED
    return listed and few and all(_PLAIN.fullmatch(key) for key in keys)


def answers(asked: Mapping[str, Any]) -> list[tuple[bool, str | None, str | None]]:
    """Return for each module whether it is meant, and the keys of its own rank and alpha. Raise re.error for an
    expression that is none."""
    found = []
    for module in asked["modules"]:
        meant = asked["all"] or (_among(asked["targets"], module) and _in_layers(asked, module))
        meant = meant and not _among(asked["excluded"], module)
        found.append((meant, _own(asked["ranks"], module), _own(asked["alphas"], module)))
    return found


def _among(names: Sequence[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith("." + name) for name in names)


def _in_layers(asked: Mapping[str, Any], module: str) -> bool:
    if asked["layers"] is None or isinstance(asked["targets"], str):
        return True
    ways = [r"(?:^|.*?\.)" + start + r"\.(\d+)\." for start in asked["layer_patterns"]] or [r".*?\.[^.]*\.(\d+)\."]
    found = next(filter(None, (re.match(way, module) for way in ways)), None)
    return found is not None and int(found[1]) in asked["layers"]


def _own(keys: Sequence[str], module: str) -> str | None:
    return next((key for key in keys if re.match(r"(.*\.)?(" + key + ")$", module)), None)


if __name__ == "__main__":
    try:
        json.dump(answers(json.load(sys.stdin)), sys.stdout)
    except re.error as error:
        json.dump(str(error), sys.stdout)
