"""Reinforcement learning from the command line: rollouts have the trainer's bits in every step, runs that were ended go
on with the same ones, and rewards rise."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.errors import DeviceLost
from ridgeline.layers.decoder import Decoder
from ridgeline.training.export import write_model
from ridgeline.training.rollouts import RolloutEngine, prompts_of
from ridgeline.training.sandbox import refusal
from ridgeline.training.tuning import Tuner
from tests.command import run_here

SIZES = ("--prompts", "2", "--samples", "4", "--max-tokens", "12", "--lr", "5e-3", "--device", "cpu")


PATTERN = "[aeiou].*[aeiou]"  # of about half of the answers


@pytest.fixture
def folder(decoder: Decoder, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A model that is sure of little."""
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    write_model(tmp_path / "model", decoder, config, tokenizer)
    return tmp_path / "model"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def add_{i}(a, b):\n"}) + "\n" for i in range(5)))
    return path


def begun(kind: str, folder: Path | str, prompts: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    reward = () if "--reward" in more else ("--reward", "regex", "--pattern", PATTERN)
    return run_here("train", kind, "--model", folder, "--data", prompts, "--out", out, *reward, *SIZES, *more)


def trained(kind: str, folder: Path | str, prompts: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    """Run the command, and return its log."""
    run = begun(kind, folder, prompts, out, *more)
    assert run.returncode == 0, run.stderr
    return rows(out)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def refused(run: subprocess.CompletedProcess[str], words: str) -> None:
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert re.search(words, line), line


FORMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "grpo of all weights": ("--method", "full", "--beta", "0.1", "--loss-type", "grpo"),
    "grpo by stale answers": ("--staleness", "1"),
    "grpo in two updates": ("--iterations", "2", "--loss-type", "dr_grpo", "--scale", "none"),
    "grpo at a temperature, measured": ("--temperature", "0.7", "--eval-every", "2", "--iterations", "2"),
    "rloo": (),
    "rloo by stale answers": ("--staleness", "2"),
    "ppo": (),
    "ppo in two updates of all weights": ("--iterations", "2", "--method", "full"),
}
TIMES = {"seconds", "tokens_per_s", "drawing_s", "waiting_s", "push_s", "reward_s", "scoring_s"}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_was_ended_goes_on_with_the_same_bits(
    form: str, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rollouts have the trainer's bits in every step, unless the policy has moved since."""
    kind, begin, stopped = form.split()[0], Tuner.begin, list[int]()
    more = ("--steps", "6", "--checkpoint-every", "2", *FORMS[form])
    more += ("--held-out", str(prompts)) if "measured" in form else ()
    whole = trained(kind, folder, prompts, tmp_path / "whole", *more)

    def failing(self: Tuner) -> Any:
        if self.step >= 3 * (1 + ("two updates" in form)) and not stopped:
            stopped.append(1)
            raise KeyboardInterrupt
        return begin(self)

    with monkeypatch.context() as patched:
        patched.setattr(Tuner, "begin", failing)
        assert begun(kind, folder, prompts, tmp_path / "parts", *more).returncode == 130
    parts = trained(kind, folder, prompts, tmp_path / "parts", *more)
    timeless = [[{k: v for k, v in row.items() if k not in TIMES} for row in each] for each in (whole, parts)]
    assert timeless[0] == timeless[1]
    made = "model/model" if "full" in FORMS[form] else "adapter/adapter_model"
    one, other = (load_file(tmp_path / name / f"{made}.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len({json.dumps(row["loss"]) for row in whole}) > 1
    if "measured" in form:
        steps = [row["step"] for row in whole if "held_out" in row]
        report = json.loads((tmp_path / "whole" / "report.json").read_text())["held_out"]
        assert steps == [4, 8, 12]
        assert len(report["reward"]) == 4
        assert all(0 <= each <= 1 for each in report["reward"])
    if "--staleness" not in FORMS[form]:
        assert {(row["kl"], row["differing"]) for row in whole} == {(0.0, 0)}
    else:
        stale = int(FORMS[form][-1])
        assert [row["staleness"] for row in whole] == [min(step, stale) for step in range(6)]
        assert whole[0]["kl"] == 0
        assert whole[-1]["kl"] > 0


@pytest.mark.parametrize("staleness", ["0", "1"])
def test_a_rollout_that_dies_leaves_a_checkpoint(
    staleness: str, folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is lost while it draws, here or in the thread that draws ahead."""
    more = ("--steps", "4", "--checkpoint-every", "1", "--staleness", staleness)
    whole, draw = trained("grpo", folder, prompts, tmp_path / "whole", *more), RolloutEngine.draw

    def dying(self: RolloutEngine, step: int, *given: Any) -> Any:
        if step == 3:
            raise DeviceLost("the device does no work any more; start a new process.")
        return draw(self, step, *given)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutEngine, "draw", dying)
        run = begun("grpo", folder, prompts, tmp_path / "parts", *more)
        assert (run.returncode != 0, "the device does no work" in run.stderr) == (True, True), run.stderr
    assert 1 < len(rows(tmp_path / "parts")) < 4
    parts = trained("grpo", folder, prompts, tmp_path / "parts", *more)
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    one, other = (load_file(tmp_path / each / "adapter/adapter_model.safetensors") for each in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_recipe_and_code_that_is_tested(folder: Path, tmp_path: Path) -> None:
    path, recipe, out = tmp_path / "prompts.jsonl", tmp_path / "recipe.yaml", tmp_path / "out"
    prefix = "def twice(x):\n    return 2 * x\n\n\n# "  # answers stand behind it, most of them on its line
    line = {"prompt": "# ", "prefix": prefix, "entry": "twice", "tests": [[[3], 6], [["a"], "aa"]]}
    path.write_text(json.dumps(line) + "\n")
    lines = [f"model: {folder}", f"data: {path}", "reward: [code, length]", "reward-weights: [2, 0.5]"]
    recipe.write_text("\n".join([*lines, "length-target: 1", "samples: 4", "prompts: 1", "max-tokens: 1", "steps: 2"]))
    unsafe = () if refusal() is None else ("--unsafe-local-rewards",)
    run = run_here("train", "grpo", "--recipe", recipe, "--out", out, "--device", "cpu", "--steps", "1", *unsafe)
    assert run.returncode == 0, run.stderr
    [row] = rows(out)
    assert row["reward"] in (1.0, 1.5, 2.0, 2.5)  # one to all of four


def test_rewards_rise_and_the_adapter_is_served(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = trained("grpo", folder, prompts, out, "--steps", "30", "--samples", "8", "--lr", "2e-2")
    first, last = (sum(row["reward"] for row in part) / 5 for part in (log[:5], log[-5:]))
    assert last > first + 0.3
    report = json.loads((out / "report.json").read_text())
    assert report["kl"] == 0
    assert "(GRPO" in (out / "adapter" / "README.md").read_text()
    assert (out / "adapter" / "reward.png").stat().st_size > 0
    with LLM(folder, dtype="float32", device="cpu", enable_lora=True) as llm:
        texts = ["def add_1(a, b):\n"] * 16
        params = SamplingParams(max_tokens=12, seed=1)
        right = []
        for request in (None, LoRARequest("a", 1, out / "adapter")):
            outputs = llm.generate(texts, params, lora_request=request, use_tqdm=False)
            right.append(sum(re.search(PATTERN, each.outputs[0].text) is not None for each in outputs))
    assert right[1] > right[0] + 4
    [row] = trained("grpo", folder, prompts, tmp_path / "on", "--adapter", str(out / "adapter"), "--steps", "1")
    assert (row["kl"], row["differing"]) == (0, 0), "the first answers are drawn by the adapter too"


def test_a_push_is_what_loading_gives(folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Weights that were copied into a live engine give the answers of an engine that read them from files."""
    out = tmp_path / "out"
    pushed = list[list[torch.Tensor]]()
    with pytest.MonkeyPatch.context() as patched:
        close = RolloutEngine.close

        def kept(self: RolloutEngine) -> None:
            pushed.append([each.clone() for each in self._weights._decoder.parameters()])
            close(self)

        patched.setattr(RolloutEngine, "close", kept)
        trained("grpo", folder, prompts, out, "--steps", "2", "--method", "full")
    with LLM(out / "model", dtype="float32", device="cpu") as llm:
        loaded = list(llm.assembly.worker.runner.decoder.parameters())  # type: ignore[attr-defined]
    for one, other in zip(pushed[0], loaded, strict=True):  # the folder's numbers are rounded to its dtype
        assert torch.equal(one.bfloat16().float(), other)


def test_prompts_come_in_a_new_order_each_time() -> None:
    order = [place for step in range(6) for place in prompts_of(step, 2, 4, seed=0)]
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert order[:4] != order[4:8] or order[4:8] != order[8:]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--reward", "beauty"), "there is no reward 'beauty'; known: length, regex, arithmetic, code"),
        (("--reward", "arithmetic"), r"prompts.jsonl, line 1: the reward arithmetic needs a number"),
        (("--reward", "regex", "--pattern", "x", "--reward-weights", "1,2"), "1 rewards need as many weights, got 2"),
        (("--samples", "1"), "samples must be at least 2, got 1"),
        (("--iterations", "2", "--staleness", "1"), "do not go together"),
        (("--temperature", "0.7", "--staleness", "1"), "in front of the temperature"),
        (("--temperature", "0"), "temperature is from 0.01 to 100, got 0"),
        (("--max-prompt-tokens", "1"), "no prompt of at most 1 tokens"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    more: tuple[str, ...], words: str, folder: Path, prompts: Path, tmp_path: Path
) -> None:
    refused(begun("grpo", folder, prompts, tmp_path / "out", *more), words)


@pytest.mark.thorough
def test_the_embedded_model_learns_in_a_minute(tmp_path: Path) -> None:
    """The example of docs/reinforcement-learning.md."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    heads = ["def area(w, h):\n", "def is_empty(self):\n", "def double(x):\n", "def name(self):\n"]
    path.write_text("".join(json.dumps({"prompt": head}) + "\n" for head in heads))
    more = ("--reward", "regex", "--pattern", r"\A\s+return [^\n]+\n", "--prompts", "4", "--samples", "8")
    log = trained("grpo", "embedded", path, out, *more, "--max-tokens", "16", "--steps", "20", "--lr", "2e-3")
    assert {(row["kl"], row["differing"]) for row in log} == {(0.0, 0)}
    first, last = (sum(row["reward"] for row in part) / 4 for part in (log[:4], log[-4:]))
    assert last > first + 0.2
