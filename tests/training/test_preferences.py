"""Losses of preferences and reward models are those of their definitions in float64, and their models are served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline import LLM, PoolingParams
from ridgeline.training.conversations import AnswerPair, ExampleReader, JudgedAnswer, Steps, examples_of
from ridgeline.training.lora import LoraConfig
from ridgeline.training.preferences import (
    Preferences,
    dpo_losses,
    kto_losses,
    orpo_losses,
    with_reference,
    without_reference,
)
from ridgeline.training.reward_models import RewardPairs, RewardSteps, classifier_entries, reward_model
from ridgeline.training.tuned import PackRunner
from ridgeline.training.weight_learner import Base, WeightLearner
from tests.training.test_fine_tune import refused, tuned
from tests.training.test_tuned import TinyModel, adapted, close, examples, opened, runs_of, their_nats

pytest.importorskip("peft")

from peft import PeftModel

from tests import tiny_models

CPU = torch.device("cpu")


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_losses_of_numbers_are_those_of_their_papers() -> None:
    chosen, rejected = [-0.4, -2.0, -0.01], [-1.5, -0.3, -3.0]
    given = torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)
    dpo = dpo_losses(*given, torch.tensor([0.2, -0.1, 0.0], dtype=torch.float64), 0.3)
    wanted = [-math.log(sigma(0.3 * (c - r - m))) for c, r, m in zip(chosen, rejected, (0.2, -0.1, 0.0), strict=True)]
    torch.testing.assert_close(dpo, torch.tensor(wanted, dtype=torch.float64))
    orpo = orpo_losses(*given, 0.3)

    def log_odds(p: float) -> float:
        return math.log(math.exp(p) / (1 - math.exp(p)))

    wanted = [-c - 0.3 * math.log(sigma(log_odds(c) - log_odds(r))) for c, r in zip(chosen, rejected, strict=True)]
    torch.testing.assert_close(orpo, torch.tensor(wanted, dtype=torch.float64))
    good = torch.tensor([True, False, True])
    for mean in (0.7, -0.7):
        z = max(mean, 0.0)
        kto = kto_losses(given[0], good, torch.tensor(mean, dtype=torch.float64), 0.3, (1.0, 2.0))
        wanted = [
            (1 - sigma(0.3 * (r - z))) if g else 2 * (1 - sigma(0.3 * (z - r)))
            for r, g in zip(chosen, good.tolist(), strict=True)
        ]
        torch.testing.assert_close(kto, torch.tensor(wanted, dtype=torch.float64))


def pairs() -> list[AnswerPair]:
    return [AnswerPair(one, other, 0.25) for one, other in zip(examples(3), examples(3, seed=1), strict=True)]


def judged() -> list[JudgedAnswer]:
    other = [*examples(3, seed=1)[1:], examples(1, seed=1)[0]]
    return [JudgedAnswer(one, two, index != 1) for index, (one, two) in enumerate(zip(examples(3), other, strict=True))]


@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_gradients_of_preferences_are_pefts_in_float64(loss: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    decoder, lora = adapted(tiny_model("llama"), "all-linear")
    untrained = runs_of(opened(tiny_model("llama"))[0])
    items: Any = judged() if loss == "kto" else pairs()
    referred = with_reference(untrained, items) if loss == "kto" else without_reference(items)
    found = Preferences(runs_of(decoder), referred, 0.3, loss, (1.0, 1.5)).sum(range(3))
    found.backward()
    lora.export(tmp_path, "base")
    base = tiny_models.build("llama").double()
    theirs = PeftModel.from_pretrained(tiny_models.build("llama").double(), tmp_path, is_trainable=True).double()
    logs = [[-their_nats(theirs, [one]) for one in examples_of(item)] for item in items]
    if loss == "orpo":
        counts = [[sum(one.counted) for one in examples_of(item)] for item in items]
        means = [
            torch.stack([log / count for log, count in zip(*both, strict=True)])
            for both in zip(logs, counts, strict=True)
        ]
        odds = [torch.log(torch.exp(p) / (1 - torch.exp(p))) for p in means]
        wanted = sum(-m[0] - 0.3 * torch.log(torch.sigmoid(o[0] - o[1])) for m, o in zip(means, odds, strict=True))
    else:
        before = [[-their_nats(base, [one]).detach() for one in examples_of(item)] for item in items]
        ratios = [[now - then for now, then in zip(*both, strict=True)] for both in zip(logs, before, strict=True)]
        z = torch.stack([each[1] for each in ratios]).mean().clamp(min=0).detach()
        terms = [
            1 - torch.sigmoid(0.3 * (each[0] - z)) if item.good else 1.5 * (1 - torch.sigmoid(0.3 * (z - each[0])))
            for each, item in zip(ratios, items, strict=True)
        ]
        wanted = sum(terms[1:], terms[0])
    assert isinstance(wanted, Tensor)
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    by_name = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, thin in lora.maps.items():
        gradient = by_name[f"base_model.model.{name.replace('/', '.')}.lora_A.weight"]
        assert gradient is not None
        close(thin.down_RI.grad, gradient, name)  # type: ignore[arg-type]


def rewarding(folder: Path, *, process: bool) -> tuple[WeightLearner, PackRunner, Any]:
    """Return a reward model of the tiny one, all of which learns, and transformers' with its weights in float64."""
    transformers = pytest.importorskip("transformers")
    entries = classifier_entries(folder, process=process)
    base = Base(folder, *reward_model(folder, entries), entries)
    learner = WeightLearner(base, "full", LoraConfig(), torch.float32, CPU, seed=0)
    out = learner.write(folder.parent / f"reward-{process}", "base")
    kind = transformers.LlamaForTokenClassification if process else transformers.LlamaForSequenceClassification
    theirs = kind.from_pretrained(out, dtype=torch.float64)
    if process:
        theirs.score.bias.data.zero_()
    return learner, PackRunner(learner.decoder, autocast=None, chunk=7), theirs.eval()


@pytest.mark.parametrize("process", [False, True])
def test_rewards_have_the_losses_and_gradients_of_transformers(process: bool, tmp_path: Path) -> None:
    learner, runs, theirs = rewarding(tiny_models.save("llama", tmp_path / "base"), process=process)
    if process:
        solutions = [Steps(one, (1, len(one.tokens) - 1), (True, False)) for one in examples(3) if len(one.tokens) > 2]
        found = RewardSteps(runs, solutions).sum(range(len(solutions)))
        wanted = torch.zeros((), dtype=torch.float64)
        for each in solutions:
            logits = theirs(torch.tensor([each.solution.tokens])).logits[0]
            labels = torch.tensor([int(right) for right in each.right])
            wanted = wanted + torch.nn.functional.cross_entropy(logits[list(each.ends)], labels, reduction="sum")
    else:
        theirs.config.pad_token_id = 0  # no example has it, so the last token is scored
        found = RewardPairs(runs, pairs(), center=0.01).sum(range(3))
        wanted = torch.zeros((), dtype=torch.float64)
        for pair in pairs():
            one, other = (theirs(torch.tensor([each.tokens])).logits[0, 0] for each in examples_of(pair))
            wanted = wanted - torch.log(torch.sigmoid(one - other - 0.25)) + 0.01 * (one + other) ** 2
    found.backward()
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert learner.head is not None
    [gradient] = [p.grad for p in learner.head.parameters()]
    assert gradient is not None
    close(gradient, theirs.score.weight.grad, "score")
    embedding = learner.decoder.embed.weight.grad
    assert embedding is not None
    close(embedding, theirs.model.embed_tokens.weight.grad, "embedding")


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_reward_model_is_trained_and_served(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"a = {i}", "chosen": "\nreturn a", "rejected": "\nprint(a)", "margin": 0.5} for i in range(8)]
    path = written(tmp_path / "pairs.jsonl", rows)
    steps = ("--steps", "12", "--held-out", str(path))
    loss = tuned(folder, path, tmp_path / "out", *steps, kind="reward")
    assert loss[-1] < 0.2 * loss[0]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["held_out"]["right"][1] == 1.0
    [pair] = ExampleReader.of_folder(folder).pairs(written(tmp_path / "one.jsonl", rows[3:4]))
    prompts: Any = [{"prompt_token_ids": list(each.tokens)} for each in examples_of(pair)]  # with the end token
    with LLM(tmp_path / "out" / "model", dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        better, worse = llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    assert float(better.outputs.data[0]) > float(worse.outputs.data[0]) + 1


def test_a_process_reward_model_is_trained_and_served(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"a = {i}\n", "completions": ["total = a", "print(b)"], "labels": [True, False]} for i in range(8)
    ]
    path = written(tmp_path / "steps.jsonl", rows)
    loss = tuned(folder, path, tmp_path / "out", "--steps", "12", "--process", "--method", "full", kind="reward")
    assert loss[-1] < 0.2 * loss[0]
    [steps] = ExampleReader.of_folder(folder).steps(written(tmp_path / "one.jsonl", rows[:1]), "\n")
    prompts: Any = [{"prompt_token_ids": list(steps.solution.tokens)}]
    with LLM(tmp_path / "out" / "model", dtype="float32", device="cpu") as llm:
        [output] = llm.encode(prompts, PoolingParams(task="token_classify"), use_tqdm=False)
    chances = torch.as_tensor(output.outputs.data)[list(steps.ends)]
    assert chances[0, 1] > 0.8
    assert chances[1, 1] < 0.2


@pytest.mark.parametrize("loss", ["orpo", "kto"])
def test_other_losses_of_preferences_are_learnt(loss: str, folder: Path, tmp_path: Path) -> None:
    good, bad = "\nreturn a", "\nprint(a)"
    if loss == "kto":
        rows = [{"prompt": f"a = {i}", "completion": bad if i % 2 else good, "label": i % 2 == 0} for i in range(8)]
    else:
        rows = [{"prompt": f"a = {i}", "chosen": good, "rejected": bad} for i in range(8)]
    out = tmp_path / "out"
    found = tuned(folder, written(tmp_path / "rows.jsonl", rows), out, "--steps", "10", "--loss", loss, kind="dpo")
    assert found[-1] < 0.7 * found[0]
    assert loss.upper() in (out / "adapter" / "README.md").read_text()


@pytest.mark.parametrize(
    ("row", "flags", "words"),
    [
        ({"prompt": "a", "completion": "b", "label": "yes"}, ("--loss", "kto"), "label must be true or false"),
        ({"prompt": "a", "label": True}, ("--loss", "kto"), "an answer has prompt, completion and label"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, (), "margin must be a number"),
    ],
)
def test_bad_lines_are_refused_in_a_sentence(
    row: dict[str, Any], flags: tuple[str, ...], words: str, folder: Path, tmp_path: Path
) -> None:
    from tests.training.test_fine_tune import begun

    path = written(tmp_path / "rows.jsonl", [row, row])
    refused(begun(folder, path, tmp_path / "out", *flags, kind="dpo"), rf"line 1: {words}")
