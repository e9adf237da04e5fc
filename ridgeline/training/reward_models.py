"""Reward models: a decoder with one map behind its final norm, which scores answers, or every step of a solution.

An answer's score is that at its last token, and pairs are compared as Bradley and Terry do (Ouyang et al., arXiv
2203.02155, section 3.5). A process reward model has two scores, wrong and right, at the last token of each step
(Lightman et al., arXiv 2305.20050). What is written is a folder of a sequence classifier.

Legend:
    D  pairs of a pack
    N  scored places
    K  labels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models import CLASSIFIES
from ridgeline.models.config import ModelConfig
from ridgeline.training.conversations import AnswerPair, Steps, examples_of
from ridgeline.training.tuned import PackRunner
from ridgeline.weights.checkpoint import open_checkpoint
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.loader import read_model_config

HEAD_STD = 0.02  # of the first numbers of a new map
LABELS = {False: ("reward",), True: ("wrong", "right")}  # process reward models have two


def classifier_entries(folder: Path, *, process: bool) -> Mapping[str, Any]:
    """Return the entries of config.json that make a reward model of a folder. Raise InvalidConfig for a folder of
    which none can be made."""
    names = read_json(folder / "config.json", required=True).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    stem = next((name.removesuffix(end) for end in ("ForCausalLM", CLASSIFIES) if name.endswith(end)), None)
    if stem is None:
        raise InvalidConfig(f"a reward model is made of a …ForCausalLM, and {folder} holds {name[:80] or 'none'!r}.")
    labels = LABELS[process]
    return {
        "architectures": [stem + CLASSIFIES],
        "num_labels": len(labels),
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification" if process else "regression",
    }


def reward_model(folder: Path, entries: Mapping[str, Any]) -> tuple[ModelConfig, ModelConfig]:
    """Return the config of the reward model, and the same with the weights that the folder has: a new map is missing
    there."""
    whole = read_model_config(folder, entries)
    if whole.spec.pooling is None or whole.spec.pooling.width != entries["num_labels"]:
        raise InvalidConfig(f"{folder} makes no reward model; give a decoder that generates text.")
    with open_checkpoint(folder) as stored:
        head = [source.name for name, each in whole.weights.items() if name.startswith("head.") for source in each]
        has = all(name in stored for name in head)
    held = {name: each for name, each in whole.weights.items() if has or not name.startswith("head.")}
    return whole, replace(whole, weights=held)


def begin_head(decoder: Decoder, *, new: bool, seed: int) -> nn.Module:
    """Return the map that learns, in float32, with its first numbers if it is new."""
    head: nn.Module = decoder.head.float().requires_grad_(True)
    if new:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                drawn = HEAD_STD * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn if parameter.ndim > 1 else torch.zeros_like(drawn))
    return head


def scores(runs: PackRunner, items: Sequence[Any], places: Sequence[Sequence[int]]) -> Tensor:
    """Return the scores at some places of each example: [N, K], float32."""
    examples, ends, start = [one for item in items for one in examples_of(item)], [], 0
    for example, own in zip(examples, places, strict=True):
        ends += [start + place for place in own]
        start += len(example.tokens)
    with runs.context():
        hidden = runs.hidden([example.tokens for example in examples])
        x_NM = runs.decoder.normed(hidden.at(torch.tensor(ends, device=runs.device)))
    found: Tensor = runs.decoder.head(x_NM.float())
    return found


def bradley_terry(chosen_D: Tensor, rejected_D: Tensor, margins_D: Tensor, center: float) -> Tensor:
    """Return the loss of each pair: [D]. margins_D: by how much the better answer should score higher. center: the
    weight of the square of both scores' sum, which keeps their mean near 0 (Eisenstein et al., arXiv 2312.09244)."""
    losses_D = -F.logsigmoid(chosen_D - rejected_D - margins_D)
    return losses_D + center * (chosen_D + rejected_D).square() if center else losses_D


class RewardPairs:
    """The losses of pairs of answers."""

    def __init__(self, runs: PackRunner, pairs: Sequence[AnswerPair], center: float = 0.0) -> None:
        self.runs, self.pairs, self.center = runs, pairs, center

    def weight(self, pack: Sequence[int]) -> int:
        return len(pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return sum(len(one.tokens) for index in pack for one in examples_of(self.pairs[index]))

    def of(self, pack: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the scores of the better answers and of the worse ones: [D] each."""
        pairs = [self.pairs[index] for index in pack]
        ends = [[len(one.tokens) - 1] for pair in pairs for one in examples_of(pair)]
        chosen_D, rejected_D = scores(self.runs, pairs, ends)[:, 0].unflatten(0, (-1, 2)).unbind(1)
        return chosen_D, rejected_D

    def sum(self, pack: Sequence[int]) -> Tensor:
        chosen_D, rejected_D = self.of(pack)
        margins_D = chosen_D.new_tensor([self.pairs[index].margin for index in pack])
        return bradley_terry(chosen_D, rejected_D, margins_D, self.center).sum()

    @torch.no_grad()
    def right(self, pack: Sequence[int]) -> int:
        """Return the number of pairs whose better answer scores higher."""
        chosen_D, rejected_D = self.of(pack)
        return int((chosen_D > rejected_D).sum())


class RewardSteps:
    """The losses of solutions' steps."""

    def __init__(self, runs: PackRunner, solutions: Sequence[Steps]) -> None:
        self.runs, self.solutions = runs, solutions

    def weight(self, pack: Sequence[int]) -> int:
        return sum(len(self.solutions[index].ends) for index in pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return sum(len(self.solutions[index].solution.tokens) for index in pack)

    def of(self, pack: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the scores of the steps [N, K], and the labels that they should have [N]."""
        solutions = [self.solutions[index] for index in pack]
        found_NK = scores(self.runs, solutions, [each.ends for each in solutions])
        return found_NK, torch.tensor([int(right) for each in solutions for right in each.right]).to(found_NK.device)

    def sum(self, pack: Sequence[int]) -> Tensor:
        found_NK, labels_N = self.of(pack)
        return F.cross_entropy(found_NK, labels_N, reduction="sum")

    @torch.no_grad()
    def right(self, pack: Sequence[int]) -> int:
        """Return the number of steps that are judged as their labels say."""
        found_NK, labels_N = self.of(pack)
        return int((found_NK.argmax(1) == labels_N).sum())
