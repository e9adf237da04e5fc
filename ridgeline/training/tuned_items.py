"""The items of a run of fine-tuning: read from its files, left out where they are too long, and given a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ridgeline.core.specs.model import ModelSpec
from ridgeline.training.conversations import (
    AnswerPair,
    ExampleReader,
    Item,
    JudgedAnswer,
    Steps,
    examples_of,
    fitting_items,
)
from ridgeline.training.objective import needed_flops
from ridgeline.training.preferences import REFERRED, Loss, Preferences, with_reference, without_reference
from ridgeline.training.reward_models import RewardPairs, RewardSteps
from ridgeline.training.tuned import NextTokens, Objective, PackRunner


class ItemConfig(Protocol):
    """The settings that say what items are (`FineTuneConfig` has them)."""

    @property
    def kind(self) -> str: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def beta(self) -> float: ...
    @property
    def weights(self) -> tuple[float, float]: ...
    @property
    def process(self) -> bool: ...
    @property
    def separator(self) -> str: ...
    @property
    def center(self) -> float: ...
    @property
    def pack_tokens(self) -> int: ...


def read_items(config: ItemConfig, reader: ExampleReader, path: Path, most: int) -> tuple[list[Any], str]:
    """Return the items of a file that fit into a pack, with at most `most` tokens each, and a sentence about others.
    Raise InvalidConfig for a bad line, or if none is left."""
    found: list[Any]
    if config.kind == "sft":
        found = reader.examples(path)
    elif config.kind == "reward" and config.process:
        found = reader.steps(path, config.separator)
    elif config.kind == "dpo" and config.loss == "kto":
        found = reader.judged(path)
    else:
        found = reader.pairs(path)
    return fitting_items(found, config.pack_tokens, most, path)


def objective_of(config: ItemConfig, runs: PackRunner, items: list[Any]) -> Objective:
    """Return the loss of items."""
    if config.kind == "sft":
        return NextTokens(runs, items)
    if config.kind == "reward":
        return RewardSteps(runs, items) if config.process else RewardPairs(runs, items, config.center)
    referred = with_reference(runs, items) if config.loss in REFERRED else without_reference(items)
    return Preferences(runs, referred, config.beta, config.loss, config.weights)


def mean_loss(objective: Objective, count: int) -> float:
    """Return the loss of so many items, each alone, over their weight."""
    with torch.no_grad():
        total = sum(float(objective.sum([index])) for index in range(count))
    return total / objective.weight(range(count))


def share_right(objective: Objective, count: int) -> float | None:
    """Return the share of pairs or steps that a reward model judges rightly; None for other objectives."""
    if not isinstance(objective, RewardPairs | RewardSteps):
        return None
    return sum(objective.right([index]) for index in range(count)) / objective.weight(range(count))


def flops_of(spec: ModelSpec, items: list[Any], thin: int | None) -> Callable[[list[int]], float]:
    """Return a function that returns the FLOPs that a pack needs. thin: as in `needed_flops`."""

    def needed(pack: list[int]) -> float:
        each = [one for index in pack for one in examples_of(items[index])]
        scored = 0 if spec.pooling is not None else sum(sum(one.counted) for one in each)
        return needed_flops(spec, [len(one.tokens) - 1 for one in each], scored, thin=thin)

    return needed


def judgements(items: list[Item]) -> list[Any]:
    """Return the judgements of items besides their tokens, for the name of a run."""
    found: list[Any] = []
    for item in items:
        match item:
            case AnswerPair():
                found.append(item.margin)
            case JudgedAnswer():
                found.append(item.good)
            case Steps():
                found.append((item.ends, item.right))
    return found
