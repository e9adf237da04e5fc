"""lm-evaluation-harness against the server, by its `local-completions` and `local-chat-completions`: it gets what the
offline API says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import DTYPE, MODEL, Server

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (pip install .[eval])"),
]
TASKS = Path(__file__).parent / "lm_eval"
ROOT = TASKS.parents[3]  # data files are named from here


def evaluated(folder: Path, model: str, tasks: list[str], /, *options: str, **args: Any) -> dict[str, Any]:
    """Return the results by task, and the samples of each by its name without the prefix."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--log_samples", *options]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in args.items())]
    command += ["--tasks", ",".join(f"ridgeline_{task}" for task in tasks), "--include_path", str(TASKS)]
    command += ["--output_path", str(folder)]
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
    for task in tasks:
        lines = next(folder.rglob(f"samples_ridgeline_{task}_*.jsonl")).read_text().splitlines()
        found[task] = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
    return found


@pytest.fixture(scope="module", params=["remote", "huggingface"])
def run(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results and samples of both tasks; "remote": the harness tokenizes by this server, too."""
    args = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": request.param,
        "num_concurrent": 4,
    }
    if request.param == "huggingface":
        args["tokenizer"] = EMBEDDED_MODEL
    return evaluated(tmp_path_factory.mktemp("lm-eval"), "local-completions", ["choose", "continue"], **args)


def test_loglikelihoods_are_the_offline_ones(run: dict[str, Any]) -> None:
    assert run["ridgeline_choose"]["acc,none"] == 1.0
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    asked = [
        (tokenizer.encode(sample["doc"]["code"], False), tokenizer.encode(sample["doc"]["code"] + choice, False))
        for sample in run["choose"]
        for choice in sample["doc"]["choices"]
    ]
    prompts: Any = [{"prompt_token_ids": whole} for _, whole in asked]
    outputs = LLM(dtype=DTYPE).generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1))
    told = [answer for sample in run["choose"] for [answer] in sample["resps"]]
    for (context, whole), output, (loglikelihood, greedy) in zip(asked, outputs, told, strict=True):
        assert output.prompt_logprobs is not None
        entries = [(output.prompt_logprobs[i] or {})[whole[i]] for i in range(len(context), len(whole))]
        # Batches differ, so sums of bfloat16 products do, in their last bit.
        assert float(loglikelihood) == pytest.approx(sum(entry.logprob for entry in entries), abs=0.05)
        assert greedy == str(all(entry.rank == 1 for entry in entries))


def test_generations_are_the_offline_ones(run: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    prompts: Any = [{"prompt_token_ids": tokenizer.encode(s["doc"]["code"], False)} for s in run["continue"]]
    outputs = LLM(dtype=DTYPE).generate(prompts, SamplingParams(temperature=0, max_tokens=24, stop="\n"))
    assert [sample["resps"][0][0] for sample in run["continue"]] == [output.outputs[0].text for output in outputs]
    right = [output.outputs[0].text == s["doc"]["rest"] for s, output in zip(run["continue"], outputs, strict=True)]
    assert any(right)
    assert run["ridgeline_continue"]["exact_match,none"] == sum(right) / len(right)


def test_chats_are_the_offline_ones(server: Server, tmp_path: Path) -> None:
    args = {"model": MODEL, "base_url": f"{server.url}/v1/chat/completions", "num_concurrent": 4}
    run = evaluated(tmp_path, "local-chat-completions", ["continue"], "--apply_chat_template", **args)
    chats: Any = [[{"role": "user", "content": sample["doc"]["code"]}] for sample in run["continue"]]
    outputs = LLM(dtype=DTYPE).chat(chats, SamplingParams(temperature=0, max_tokens=24, stop="\n"))
    assert [sample["resps"][0][0] for sample in run["continue"]] == [output.outputs[0].text for output in outputs]
