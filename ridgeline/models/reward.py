"""Reward models: Qwen2 with a score for every token, or the chances of a step being right behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.core.specs.pooling import HeadSpec, PoolingSpec
from ridgeline.models.config import Config
from ridgeline.models.labels import Probabilities
from ridgeline.models.names import named
from ridgeline.models.qwen2 import Qwen2

STEP = 151651  # the token "<extra_0>", which ends each step of a solution


class Qwen2Reward:
    name: ClassVar[str] = "Qwen2ForRewardModel"
    labels: ClassVar[tuple[str, ...]] = ("reward",)
    activation: ClassVar[Probabilities] = "none"
    steps: ClassVar[bool] = False

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        decoder = Qwen2.spec(config)
        token = Config(config, {"step_tag_id": STEP}).integer("step_tag_id", at_least=0) if cls.steps else None
        pooling = PoolingSpec(
            kind="last",
            task="token_classify",
            width=len(cls.labels),
            head=(HeadSpec(outputs=decoder.hidden_size, activation="relu"), HeadSpec(outputs=len(cls.labels))),
            whole=decoder.sees_behind,
            normalize=False,
            activation=cls.activation,
            labels=cls.labels,
            only_token=token,
        )
        return replace(decoder, architecture=cls.name, pooling=pooling, unused=("lm_head.",))

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        found = {name: sources for name, sources in Qwen2.weights(spec).items() if not name.startswith("unembed.")}
        for index, layer in enumerate((0, 2)):  # a ReLU is between them
            found |= named(f"head.maps.{index}", "score", {"dense": str(layer)}, bias=True)
        return found


class Qwen2ProcessReward(Qwen2Reward):
    name = "Qwen2ForProcessRewardModel"
    labels = ("wrong", "right")
    activation = "softmax"
    steps = True
