"""The ranks on which a model's experts lie, by a user's file of measured load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.perf.placement import placed


def placement_of(config: LLMConfig, model: ModelSpec) -> Placement | None:
    """Return the experts of each rank in each mixture, or None for equal parts. Raise InvalidConfig."""
    spare, file = config.num_redundant_experts, config.init_expert_location
    if config.ranks == 1 or not (spare or file is not None or config.enable_eplb):
        return None
    counts = [
        layer.feed_forward.routing.experts for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)
    ]
    load = [np.ones(count) for count in counts] if file is None else _read(Path(file), counts)
    found = []
    for count, tokens_E in zip(counts, load, strict=True):
        if (count + spare) % config.ranks:
            raise InvalidConfig(
                f"{config.ranks} ranks do not divide {count} experts and num_redundant_experts {spare}; choose another "
                "number."
            )
        if spare > count * (config.ranks - 1):
            raise InvalidConfig(
                f"num_redundant_experts is {spare}: with {count} experts on {config.ranks} ranks at most "
                f"{count * (config.ranks - 1)} copies are of use; lower it."
            )
        found.append(placed(tokens_E, config.ranks, (count + spare) // config.ranks))
    return tuple(found)


def _read(file: Path, counts: list[int]) -> list[np.ndarray]:
    """Return the tokens counted by the experts of each mixture, from a file with {"logical_count": [[…], …]} or from
    the answer of a server at /dashboard/data. Raise InvalidConfig."""
    try:
        content: Any = json.loads(file.read_text())
        rows = content["logical_count"] if "logical_count" in content else content["experts"]["tokens"]
        load = [np.array(row, np.float64) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f'init_expert_location {file} is no file of JSON with {{"logical_count": [[tokens of each expert], …]}} '
            f"({error})."
        ) from error
    if [row.shape for row in load] != [(count,) for count in counts]:
        raise InvalidConfig(
            f"init_expert_location {file} counts {[row.size for row in load]} experts, and the model's layers have "
            f"{counts}; measure this model."
        )
    if any((row < 0).any() or not np.isfinite(row).all() for row in load):
        raise InvalidConfig(f"init_expert_location {file} has counts below 0; measure again.")
    return load
