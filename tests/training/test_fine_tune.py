"""Fine-tuning from the command line: what it writes runs in the engine, what ends it leaves a checkpoint, mistakes are
refused in a sentence."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.training import checkpoint
from ridgeline.training.conversations import ExampleReader
from ridgeline.training.tuned import NextTokens
from ridgeline.training.tuning import Tuner
from tests.command import run_here

ANSWER = "print(total)"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"a = {i % 7}"}, {"role": "assistant", "content": ANSWER}]}
        for i in range(24)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tuned(folder: Path, data: Path, out: Path, *more: str, kind: str = "sft") -> list[float]:
    """Run the command, and return the losses of its log."""
    run = begun(folder, data, out, *more, kind=kind)
    assert run.returncode == 0, run.stderr
    return losses(out)


def begun(folder: Path, data: Path, out: Path, *more: str, kind: str = "sft") -> subprocess.CompletedProcess[str]:
    """Run the command, however it ends."""
    sizes = ("--pack-tokens", "64", "--packs", "2", "--lr", "2e-2", "--device", "cpu")
    return run_here("train", kind, "--model", folder, "--data", data, "--out", out, *sizes, *more)


def refused(run: subprocess.CompletedProcess[str], words: str) -> None:
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert re.search(words, line), line


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def answer(folder: Path, prompt: str, adapter: Path | None = None) -> str:
    with LLM(folder, dtype="float32", device="cpu", enable_lora=adapter is not None) as llm:
        request = None if adapter is None else LoRARequest("a", 1, adapter)
        params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.0)
        [output] = llm.chat([{"role": "user", "content": prompt}], params, lora_request=request, use_tqdm=False)
    return output.outputs[0].text.strip()


def test_an_adapter_learns_is_served_and_has_a_card(folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    loss = tuned(folder, data, out, "--epochs", "20", "--rank", "8", "--held-out", str(data))
    assert loss[-1] < 0.1 * loss[0]
    assert answer(folder, "a = 3", out / "adapter") == ANSWER
    assert answer(folder, "a = 3") != ANSWER
    report = json.loads((out / "report.json").read_text())
    before, after = report["held_out"]["loss"]
    assert after < 0.1 * before
    assert "rank 8" in (out / "adapter" / "README.md").read_text()
    assert (out / "adapter" / "loss.png").stat().st_size > 0


def test_all_weights_learn_and_the_folder_loads(folder: Path, data: Path, tmp_path: Path) -> None:
    loss = tuned(folder, data, tmp_path / "out", "--epochs", "20", "--method", "full", "--lr", "3e-3", "--recompute")
    assert loss[-1] < 0.1 * loss[0]
    model = tmp_path / "out" / "model"
    assert answer(model, "a = 3") == ANSWER
    assert load_file(model / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def tensors_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "adapter" / "adapter_model.safetensors")


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    begin = Tuner.begin

    def failing(self: Tuner) -> Any:
        if self.step == at:
            raise error
        return begin(self)

    monkeypatch.setattr(Tuner, "begin", failing)


def test_a_run_that_was_ended_goes_on_with_the_same_bits(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("--steps", "7", "--checkpoint-every", "3")
    whole = tuned(folder, data, tmp_path / "whole", *steps)
    with monkeypatch.context() as patched:
        interrupted(patched, 5, KeyboardInterrupt())
        assert begun(folder, data, tmp_path / "parts", *steps).returncode == 130
    assert tuned(folder, data, tmp_path / "parts", *steps) == whole
    one, other = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    refused(begun(folder, data, tmp_path / "parts", *steps, "--seed", "1"), "other seed; give the same settings")


def test_a_full_disk_keeps_the_checkpoint_before(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("--steps", "6", "--checkpoint-every", "2")
    whole = tuned(folder, data, tmp_path / "whole", *steps)
    save, calls = checkpoint.save_file, list[int]()

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(1)
        if len(calls) == 4:  # the optimizer's part of the second checkpoint
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        ended = begun(folder, data, tmp_path / "parts", *steps)
        refused(ended, r"step 4 cannot be written .*No space left.*one before it is kept")
    assert json.loads((tmp_path / "parts" / "checkpoint" / "state.json").read_text())["step"] == 2
    assert tuned(folder, data, tmp_path / "parts", *steps) == whole


def test_numbers_that_are_none_end_the_run_behind_the_last_good_step(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("--steps", "6", "--checkpoint-every", "0")
    whole, total = tuned(folder, data, tmp_path / "whole", *steps), NextTokens.sum
    seen = list[int]()

    def poisoned(self: NextTokens, pack: Sequence[int]) -> Tensor:
        seen.append(1)
        return total(self, pack) * (float("nan") if len(seen) == 8 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(NextTokens, "sum", poisoned)
        refused(begun(folder, data, tmp_path / "parts", *steps), "step 4 has loss nan .*goes on behind step 3")
    assert tuned(folder, data, tmp_path / "parts", *steps) == whole


def test_a_recipe_stands_for_flags_and_flags_win(folder: Path, data: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    lines = [f"model: {folder}", f"data: {data}", "pack-tokens: 64", "steps: 9", "targets: [q_proj, v_proj]", "rank: 3"]
    recipe.write_text("\n".join([*lines, "device: cpu"]))
    run_here("train", "sft", "--recipe", recipe, "--out", out, "--steps", "1")
    assert len(losses(out)) == 1
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (3, ["q_proj", "v_proj"])
    recipe.write_text("epoch: 3")
    ended = run_here("train", "sft", "--recipe", recipe, "--out", out)
    refused(ended, "sets 'epoch', which is no option of this command; did you mean 'epochs'")


def test_preferences_are_learnt(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"a = {i}", "chosen": "\nreturn a", "rejected": "\nprint(a)"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = tuned(folder, path, tmp_path / "out", "--steps", "8", kind="dpo")
    assert loss[0] == pytest.approx(0.6931, abs=1e-3)
    assert loss[-1] < 0.1
    assert len(ExampleReader.of_folder(folder).pairs(path)) == 8


@pytest.mark.thorough
def test_the_whole_way_from_examples_to_a_merged_model(folder: Path, data: Path, tmp_path: Path) -> None:
    """QLoRA on examples, then on preferences from that adapter, then merged: the adapter's answer each time."""
    qlora = ("--method", "qlora")
    tuned(folder, data, tmp_path / "tuned", "--epochs", "20", "--checkpoint-every", "5", *qlora)
    path, adapter = tmp_path / "pairs.jsonl", tmp_path / "tuned" / "adapter"
    rows = [{"prompt": f"a = {i}", "chosen": "\nreturn a", "rejected": "\nprint(a)"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "preferred"
    loss = tuned(folder, path, out, "--steps", "8", "--adapter", str(adapter), *qlora, "--lr", "2e-3", kind="dpo")
    assert loss[0] == pytest.approx(0.6931, abs=1e-3)
    assert loss[-1] < loss[0]
    merging = run_here("convert", folder, tmp_path / "merged", "--merge", out / "adapter")
    assert merging.returncode == 0, merging.stderr
    assert answer(tmp_path / "merged", "a = 3") == answer(folder, "a = 3", out / "adapter") != answer(folder, "a = 3")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rank", "0"), "rank of an adapter is 1 to"),
        (("--targets", "query"), "is called query; it has"),
        (("--pack-tokens", "3"), "no example of at most 3 tokens"),
        (("--epochs", "0"), "epochs must be a number above 0"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    flags: tuple[str, str], words: str, folder: Path, data: Path, tmp_path: Path
) -> None:
    refused(begun(folder, data, tmp_path / "out", *flags), words)
