"""Rewards by a model: its scores are transformers', and runs of reinforcement learning take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.judge import RewardJudge
from ridgeline.training.lora import LoraConfig
from ridgeline.training.reward_models import classifier_entries, reward_model
from ridgeline.training.rewards import DrawnAnswer, RewardConfig
from ridgeline.training.weight_learner import Base, WeightLearner
from tests.command import run_here
from tests.training.test_reinforce import SIZES, folder, prompts, refused, rows  # noqa: F401 (fixtures)

CPU = torch.device("cpu")


@pytest.fixture
def judging(folder: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A reward model with weights of its own."""
    entries = classifier_entries(folder, process=False)
    base = Base(folder, *reward_model(folder, entries), entries)
    learner = WeightLearner(base, "full", LoraConfig(), torch.float32, CPU, seed=3)
    return learner.write(tmp_path / "judge", "base")


def test_scores_are_those_of_transformers(judging: Path) -> None:
    """Of texts, of an empty answer, and of answers of unlike lengths together."""
    texts = ["    return a + b\n", "", "    return 1", "    raise ValueError(a, b)\n"]
    answers = [DrawnAnswer(text, 1, True, {"prompt": "def add(a, b):\n"}) for text in texts]
    judge = RewardJudge(LLM, judging, torch.float32, CPU, 32)
    try:
        found, tokens = judge(answers), [judge._reader.answered(each.record, each.text) for each in answers]
    finally:
        judge.close()
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(judging, dtype=torch.float32).eval()
    for score, each in zip(found, tokens, strict=True):
        theirs.config.pad_token_id = next(i for i in range(1000) if i not in each)
        with torch.inference_mode():
            assert score == pytest.approx(float(theirs(torch.tensor([each])).logits[0, 0]), abs=1e-4)
    assert len({round(each, 4) for each in found}) == 4


def test_runs_take_the_scores_of_a_model(folder: Path, prompts: Path, judging: Path, tmp_path: Path) -> None:  # noqa: F811
    """PPO with its four models: the policy with a value head, the reference, and the one that rewards."""
    out = tmp_path / "out"
    command = ("--model", folder, "--data", prompts, "--out", out, "--reward", "model,length", "--length-target", "9")
    run = run_here("train", "ppo", *command, "--reward-model", str(judging), "--steps", "3", "--beta", "0.1", *SIZES)
    assert run.returncode == 0, run.stderr
    log = rows(out)
    assert len({row["reward"] for row in log}) == 3
    assert {(row["kl"], row["differing"]) for row in log} == {(0.0, 0)}
    assert all(row["reward_s"] > 0 and row["drawing_s"] > 0 for row in log)
    assert json.loads((out / "report.json").read_text())["rewards"] == ["model", "length"]
    refused(run_here("train", "grpo", *command[:6], "--reward", "model", *SIZES), "needs --reward-model")


def test_models_that_score_nothing_are_refused(folder: Path) -> None:  # noqa: F811
    with pytest.raises(InvalidConfig, match="is no model that scores texts"):
        RewardJudge(LLM, folder, torch.float32, CPU, 32)
    with pytest.raises(InvalidConfig, match="give both, or neither"):
        RewardConfig(names=("length",), model="somewhere")
