"""The modules that an adapter's config means. Its expressions come from strangers, and an expression can take years on
a name of fifty letters. So another process compares, and is ended if it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.adapters.config import ALL_LINEAR, AdapterConfig

SECONDS = 5.0

# Answers one line for each module: whether it is meant, and the keys of its own rank and alpha. The rules are those of
# PEFT's documentation of target_modules, exclude_modules, layers_to_transform, rank_pattern and alpha_pattern.
_PROGRAM = r"""
import json, re, sys

asked = json.load(sys.stdin)


def among(names, module):
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith("." + name) for name in names)


def in_layers(module):
    if asked["layers"] is None or isinstance(asked["targets"], str):
        return True
    starts = asked["layer_patterns"]
    ways = [r"(?:^|.*?\.)" + start + r"\.(\d+)\." for start in starts] or [r".*?\.[^.]*\.(\d+)\."]
    found = next(filter(None, (re.match(way, module) for way in ways)), None)
    return found is not None and int(found[1]) in asked["layers"]


def own(keys, module):
    return next((key for key in keys if re.match(r"(.*\.)?(" + key + ")$", module)), None)


try:
    answers = []
    for module in asked["modules"]:
        meant = asked["all"] or (among(asked["targets"], module) and in_layers(module))
        meant = meant and not among(asked["excluded"], module)
        answers.append([meant, own(asked["ranks"], module), own(asked["alphas"], module)])
except re.error as error:
    answers = str(error)
json.dump(answers, sys.stdout)
"""


class Meant(NamedTuple):
    """The rank and the scale of a module that an adapter changes."""

    rank: int
    scale: float


def meant_modules(config: AdapterConfig, modules: Sequence[str], folder: Path) -> dict[str, Meant]:
    """Return those of the modules that the config means. Raise ModelLoadError for expressions that are wrong or take
    too long."""
    targets = config.targets
    every = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    asked = {
        "modules": list(modules),
        "targets": targets,
        "all": every,
        "excluded": config.excluded,
        "layers": None if config.layers is None else sorted(config.layers),
        "layer_patterns": config.layer_patterns,
        "ranks": list(config.ranks),
        "alphas": list(config.alphas),
    }
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(
            f"the expressions of {folder / 'adapter_config.json'} take more than {SECONDS:g} seconds on the model's "
            "modules; list the modules instead."
        ) from error
    except subprocess.CalledProcessError as error:
        raise ModelLoadError(
            f"the expressions of {folder / 'adapter_config.json'} cannot be used; list modules."
        ) from error
    answers = json.loads(ran.stdout)
    if isinstance(answers, str):
        raise ModelLoadError(
            f"{folder / 'adapter_config.json'} has an expression that is none ({answers[:99]}); mend it."
        )
    found = {}
    for module, (is_meant, rank_key, alpha_key) in zip(modules, answers, strict=True):
        rank, alpha = config.ranks.get(rank_key, config.rank), config.alphas.get(alpha_key, config.alpha)
        if is_meant:
            found[module] = Meant(rank, config.scale(rank, alpha))
    return found
