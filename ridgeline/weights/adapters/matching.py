"""The modules that an adapter's config means. Its expressions come from strangers, and an expression can take years on
a name of fifty letters. So another process compares them, and is ended if it takes too long. Names that are listed are
compared here, since a process takes longer than a small adapter's file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.adapters import rules
from ridgeline.weights.adapters.config import ALL_LINEAR, AdapterConfig

SECONDS = 5.0


class Meant(NamedTuple):
    """The rank and the scale of a module that an adapter changes."""

    rank: int
    scale: float


def meant_modules(config: AdapterConfig, modules: Sequence[str], folder: Path) -> dict[str, Meant]:
    """Return those of the modules that the config means. Raise ModelLoadError for expressions that are wrong or take
    too long."""
    targets = config.targets
    every = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    asked: dict[str, Any] = {
        "modules": list(modules),
        "targets": targets,
        "all": every,
        "excluded": config.excluded,
        "layers": None if config.layers is None else sorted(config.layers),
        "layer_patterns": config.layer_patterns,
        "ranks": list(config.ranks),
        "alphas": list(config.alphas),
    }
    answers = rules.answers(asked) if rules.is_plain(asked) else _compared_apart(asked, folder)
    found = {}
    for module, (is_meant, rank_key, alpha_key) in zip(modules, answers, strict=True):
        rank, alpha = config.ranks.get(rank_key, config.rank), config.alphas.get(alpha_key, config.alpha)
        if is_meant:
            found[module] = Meant(rank, config.scale(rank, alpha))
    return found


def _compared_apart(asked: dict[str, Any], folder: Path) -> list[Any]:
    """Return the answers of another process."""
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", rules.__file__],
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
    answers: list[Any] | str = json.loads(ran.stdout)
    if isinstance(answers, str):
        raise ModelLoadError(
            f"{folder / 'adapter_config.json'} has an expression that is none ({answers[:99]}); mend it."
        )
    return answers
