"""lm-evaluation-harness through the offline API gets what its own `hf` model gets from transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig
from tests.bench.quality.conftest import TEXT

if find_spec("lm_eval") is None or find_spec("accelerate") is None:
    pytest.skip("lm-eval is not installed (pip install .[eval])", allow_module_level=True)

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ridgeline_bench.quality.harness import RidgelineLM, sampling_params

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests/serving/lm_eval"
# float32 on both sides; a text's loglikelihood is a sum of up to a hundred, each some 5 nats with an error of 1e-6.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def ours(llm: LLM) -> RidgelineLM:
    return RidgelineLM(llm)


@pytest.fixture(scope="module")
def huggingface(folder: Path, ours: RidgelineLM, theirs: transformers.PreTrainedModel) -> Iterator[HFLM]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yield HFLM(
        pretrained=theirs, tokenizer=tokenizer, dtype="float32", device="cpu", batch_size=4, max_length=ours.max_length
    )
    torch.manual_seed(0)  # the harness leaves seeds of its own


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, i, ("task", i, 1)) for i, each in enumerate(arguments)]


def test_loglikelihoods_are_those_of_the_hf_model(ours: RidgelineLM, huggingface: HFLM) -> None:
    contexts = TEXT.split()[:12]
    best = ours.generate_until(asked("generate_until", *((context, {"max_gen_toks": 1}) for context in contexts)))
    pairs = [
        ("the quick brown", " fox"),
        ("the quick brown ", "dog"),  # the space moves over
        ("", "the lazy dog"),  # behind BOS
        (TEXT * 4, " and the hen"),  # longer than the context: the beginning goes
        ("é", TEXT[:60]),
        *((context, token) for context, token in zip(contexts, best, strict=True) if token),
    ]
    requests = asked("loglikelihood", *pairs)
    found, expected = ours.loglikelihood(requests), huggingface.loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=CLOSE)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert {is_greedy for _, is_greedy in found} == {True, False}


def test_whole_texts_score_as_in_the_hf_model(ours: RidgelineLM, huggingface: HFLM) -> None:
    requests = asked("loglikelihood_rolling", (TEXT,), (TEXT * 5,), ("hen",), ("",))
    found = ours.loglikelihood_rolling(requests)
    expected = huggingface.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=CLOSE * 5, rel=1e-6)
    assert found[3] == 0


def test_greedy_texts_are_those_of_the_hf_model(ours: RidgelineLM, huggingface: HFLM) -> None:
    plain = {"until": [], "max_gen_toks": 24, "do_sample": False}
    first = ours.generate_until(asked("generate_until", ("the quick", plain)))[0]
    inside = first[len(first) // 2 : len(first) // 2 + 2]
    requests = asked(
        "generate_until",
        ("the quick", plain),
        ("the quick", {**plain, "until": ["\n\n", inside]}),
        ("the quick", {"until": inside, "max_gen_toks": 24, "temperature": 0.0}),
        (TEXT * 4, plain),  # its beginning goes
        ("over the lazy", {"until": ["hen"], "max_new_tokens": 9}),
    )
    # HFLM counts the prompt's room from max_length, two tokens less than the context here.
    huggingface._max_length = 256
    try:
        expected = huggingface.generate_until(requests, disable_tqdm=True)
    finally:
        huggingface._max_length = ours.max_length
    found = ours.generate_until(requests)
    assert found == expected
    assert inside not in found[1]
    assert found[1] == found[2] == first[: first.index(inside)]


def test_a_task_gives_the_same_samples(ours: RidgelineLM, huggingface: HFLM, tmp_path: Path) -> None:
    def samples(model: Any) -> dict[str, Any]:
        tasks = []
        for name in ("choose", "continue"):
            task = yaml.safe_load((TASKS / f"{name}.yaml").read_text())
            data = {"test": str(TASKS / f"{name}.json")}
            tasks.append(task | {"dataset_kwargs": {"data_files": data, "cache_dir": str(tmp_path)}})
        manager = TaskManager(include_defaults=False)  # reading the harness' own tasks takes half a minute
        return simple_evaluate(model, tasks=tasks, bootstrap_iters=0, task_manager=manager)["samples"]

    found, expected = samples(ours), samples(huggingface)
    for mine, hf in zip(found["ridgeline_choose"], expected["ridgeline_choose"], strict=True):
        for [(value, is_greedy)], [(hf_value, hf_greedy)] in zip(mine["resps"], hf["resps"], strict=True):
            assert value == pytest.approx(hf_value, abs=CLOSE)
            assert is_greedy == hf_greedy
        assert mine["acc"] == hf["acc"]
    texts, hf_texts = ([s["resps"] for s in each["ridgeline_continue"]] for each in (found, expected))
    assert texts == hf_texts


def test_the_harness_finds_the_model_by_its_name(folder: Path) -> None:
    made = RidgelineLM.create_from_arg_string(f"model={folder},dtype=float32", {"batch_size": 1, "device": "cpu"})
    assert made.llm.assembly.dtype == "float32"
    chat = made.apply_chat_template([{"role": "user", "content": "hens"}])
    assert chat == "<|user|>hens\n<|assistant|>"
    made.llm.shutdown()


def test_generation_arguments_we_lack_are_refused() -> None:
    assert sampling_params({"do_sample": False, "temperature": 0.7, "top_p": 0.5}).temperature == 0
    assert sampling_params({"temperature": 0.7, "top_p": 0.5}).top_p == 0.5
    assert sampling_params({"do_sample": False, "num_beams": 1}).max_tokens == 256
    with pytest.raises(InvalidConfig, match="num_beams"):
        sampling_params({"num_beams": 4})
    with pytest.raises(InvalidConfig, match="penalty_alpha"):
        sampling_params({"penalty_alpha": 0.6})


def run(*arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", "eval", "harness", *map(str, arguments)]
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, timeout=280, check=False
    )


def test_the_command_runs_tasks_on_the_embedded_model(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    tasks = "ridgeline_choose,ridgeline_continue"
    done = run("--tasks", tasks, "--include-path", TASKS, "--limit", 3, "--json", "--out", out, home=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["ridgeline_choose"]["acc,none"] == 1.0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["workload"], r["metric"], r["better"]) for r in records} == {
        ("harness:ridgeline_choose", "acc", "higher"),
        ("harness:ridgeline_continue", "exact_match", "higher"),
    }
    assert all(r["options"]["limit"] == 3 for r in records)
