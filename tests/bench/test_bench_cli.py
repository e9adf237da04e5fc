"""`ridgeline bench`, run as a user runs it, on tiny models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline_bench.results import Record, append, read
from tests.command import run_here

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not wrapped."""
    monkeypatch.setenv("COLUMNS", "200")


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in this process. Engines are measured in others all the same."""
    return run_here("bench", *arguments)


@pytest.mark.dealt
def test_the_command_is_a_process_of_its_own(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ridgeline", "bench", "latency", "--model", str(tiny_model("llama")), "--dummy"]
    sizes = ["--requests", "2", "--input-len", "5", "--output-len", "4", "--device", "cpu"]
    done = subprocess.run([*command, *sizes, "--out", tmp_path / "r"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = {record.metric: record for record in read([tmp_path / "r"])}
    assert len(records["itl p50"].samples) == 2 * 3
    assert records["itl p50"].value <= records["itl p99"].value


@pytest.mark.dealt
@pytest.mark.parametrize(
    "weights", [[], pytest.param(["--dummy"], marks=pytest.mark.thorough)], ids=["checkpoint", "dummy"]
)
def test_compare_runs_both_engines_on_the_same_work(
    tiny_model: Callable[[str], Path], tmp_path: Path, weights: list[str]
) -> None:
    out = tmp_path / "new" / "r.jsonl"
    done = bench(
        "compare", "--model", tiny_model("llama"), "--peer", "transformers", "--device", "cpu",
        "--scale", "0.02", "--only", "W1,W2,W3-b64,W4,W5", "--out", out, *weights,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "W4-1x30000: it needs" in done.stderr, "600 tokens do not fit into 256 positions"
    records = read([out])
    figures = [{(r.workload, r.metric) for r in records if r.engine == e} for e in ("ridgeline", "transformers")]
    assert figures[0] == figures[1]
    processor = {figure for figure in figures[0] if figure[1].endswith(", processor")}
    clock = {(workload, f"{name}, processor") for workload, name in figures[0] - processor if workload != "startup"}
    assert processor == (set() if torch.cuda.is_available() else clock)
    assert {w for w, _ in figures[0]} == {"startup", "W1", "W2", "W3-b64", "W4-1x1024", "W4-1x8192", "W4-8x8192", "W5"}
    for r in records:
        assert r.value > 0 or r.metric.startswith(("tpot", "step")), r  # differences of noisy times
        assert r.machine.torch
        assert r.machine.python == sys.version.split()[0]
        assert r.options["scale"] == 0.02
        assert r.version
    starts = {r.metric: r.value for r in records if r.workload == "startup" and r.engine == "ridgeline"}
    assert 0 < starts["ready"] < starts["first token"]


def test_throughput_and_startup_append(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    out, common = tmp_path / "r.jsonl", ("--model", tiny_model("llama"), "--device", "cpu")
    for command, *arguments in (
        ("throughput", "--requests", "3", "--input-len", "5", "--output-len", "4"),
        ("startup", "--repeats", "2"),
    ):
        done = bench(command, *arguments, *common, "--out", out, "--track", "jsonl", "--track-to", tmp_path / "runs")
        assert done.returncode == 0, done.stderr
    records = {(r.workload, r.metric): r for r in read([out])}
    assert records["throughput", "total"].value == pytest.approx(9 / 4 * records["throughput", "output"].value)
    assert len(records["startup", "ready"].samples) == 2
    assert {"stage: imports", "stage: weights"} <= {metric for _, metric in records}
    assert records["startup", "stage: weights"].value <= records["startup", "ready"].value
    events = [json.loads(line) for file in tmp_path.glob("runs/*/run.jsonl") for line in file.read_text().splitlines()]
    kept = {figure for event in events for figure in event.get("values", {}).items()}
    assert kept == {(f"ridgeline/{r.workload}/{r.metric}", r.value) for r in read([out])}
    assert {e["parameters"]["requests"] for e in events if e.get("name") == "bench throughput"} == {3}
    assert [e["failed"] for e in events if e["event"] == "end"] == [False, False]


def test_a_workload_that_does_not_fit_is_left_out_and_said_so(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = "--model", tiny_model("llama"), "--device", "cpu", "--peer", "none", "--out", tmp_path / "r.jsonl"
    done = bench("compare", *arguments, "--only", "W2", "--extra", '{"max_num_seqs": 1}')
    assert done.returncode == 0, done.stderr  # the tiny model has 256 positions
    assert "leaves out W2" in done.stderr


@pytest.mark.timing
def test_a_run_that_takes_too_long_is_stopped_and_said_so(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    arguments = "--model", tiny_model("llama"), "--device", "cpu", "--peer", "none", "--out", tmp_path / "r.jsonl"
    slow = bench("compare", *arguments, "--only", "W2,W5", "--scale", "0.1", "--timeout", "1")
    assert "was stopped after 1 s" in slow.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["compare", "--peer", "nobody", "--only", "W2", "--scale", "0.02"], "nobody"),
        (["compare", "--only", "W9"], "W9"),
        (["compare", "--scale", "7"], "7"),
        (["compare", "--model", "/no/such"], "/no/such"),
        (["compare", "--extra", "[1]"], "[1]"),
        (["throughput", "--engine", "llama_cpp"], "llama"),
        (["kernels", "--op", "frobnicate", "--device", "cpu"], "frobnicate"),
        (["kernels", "--dtype", "int3", "--device", "cpu"], "int3"),
        (["throughput", "--track", "wandb"], "takes jsonl, tensorboard, mlflow"),
        (["diff", "one.jsonl"], "two result files"),
        (["diff", "/no/a.jsonl", "/no/b.jsonl"], "/no/a.jsonl"),
        (["diff", "--run", "exit 3", "true"], "exit code 3"),
        (["report", "/no/such.jsonl"], "/no/such.jsonl"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(arguments: list[str], word: str, tmp_path: Path) -> None:
    where = ["--out", str(tmp_path / "r")] if arguments[0] in ("compare", "throughput", "kernels") else []
    done = run_here("bench", *arguments, *where)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("peer", "word"),
    [
        (
            ["--peer", "nobody"],
            "known: deepspeed, llama_cpp, lmdeploy, onnxruntime_genai, ridgeline, sglang, transformers, vllm",
        ),
        (["--peer", "sglang"], "sglang cannot be imported"),
        (["--peer", "vllm", "--peer-path", "/no/such"], "vllm cannot be imported"),
        (["--peer", "vllm", "--peer-python", "/no/python"], "/no/python"),
    ],
)
def test_a_peer_that_cannot_run_is_told_before_anything_is_measured(peer: list[str], word: str, tmp_path: Path) -> None:
    done = bench("compare", *peer, "--out", tmp_path / "r")
    assert done.returncode == 2
    assert word in done.stderr
    assert "ridgeline: ridgeline: " not in done.stderr
    assert not (tmp_path / "r").exists()


def test_what_is_being_done_is_told_where_no_terminal_shows_it(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    done = bench(
        "startup", "--repeats", "1", "--model", tiny_model("llama"), "--device", "cpu", "--out", tmp_path / "r"
    )
    assert [line for line in done.stderr.splitlines() if line.startswith("ridgeline: ridgeline: ")] == [
        "ridgeline: ridgeline: loading",
        "ridgeline: ridgeline: ready",
        "ridgeline: ridgeline: first",
    ]


@pytest.mark.dealt
@pytest.mark.skipif(shutil.which("sleep") is None, reason="needs sleep")
def test_diff_runs_two_commands_in_turn() -> None:
    slower = bench("diff", "--pairs", "7", "--run", "sleep 0.05", "sleep 0.6")
    assert slower.returncode == 1, slower.stderr
    assert "slower" in slower.stdout
    printed = bench("diff", "--pairs", "5", "--run", "echo took; echo 2.0", "echo 1.0")
    assert (printed.returncode, "faster: -50.0 %" in printed.stdout) == (0, True), printed.stdout


STAND_IN = """
import os
from types import SimpleNamespace as N
__version__ = "0.0.stand-in"
assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize
        self.max_tokens = max_tokens - int(os.environ.get("SHORT_BY", "0"))

class LLM:
    def __init__(self, *, model, load_format, skip_tokenizer_init, enable_prefix_caching, max_model_len, **others):
        assert others.pop("swap_space") == 4 and load_format == "dummy" and max_model_len == 256
        self.llm_engine = N(model_config=N(dtype="torch.bfloat16"))

    def generate(self, prompts, params, use_tqdm):
        assert all(p["prompt_token_ids"] for p in prompts)
        return [N(outputs=[N(token_ids=[0] * p.max_tokens)]) for p in params]
"""


def with_stand_in(model: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """vLLM is not installed where tests run: a module of its name, in a folder only the peer's process sees."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(STAND_IN)
    return bench(
        "compare", "--model", model, "--dummy", "--device", "cpu", "--scale", "0.02", "--only", "W2",
        "--peer", "vllm", "--peer-path", tmp_path / "site", "--peer-extra", '{"swap_space": 4}',
        "--out", tmp_path / "r.jsonl",
    )  # fmt: skip


def test_vllm_is_called_as_its_offline_api_wants_from_the_folder_given(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    done = with_stand_in(tiny_model("llama"), tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = [r for r in read([tmp_path / "r.jsonl"]) if r.engine == "vllm"]
    assert {(r.version, r.dtype) for r in theirs} == {("0.0.stand-in", "bfloat16")}
    assert {r.workload for r in theirs} == {"startup", "W2"}


SGLANG_STAND_IN = """
from types import SimpleNamespace as N

class Engine:
    def __init__(self, *, model_path, load_format, skip_tokenizer_init, context_length, mem_fraction_static, **others):
        assert load_format == "dummy" and skip_tokenizer_init and context_length == 256
        assert others.pop("disable_overlap_schedule")
        self.server_args = N(dtype="bfloat16")

    def generate(self, *, input_ids, sampling_params, stream=False):
        if stream:
            count = sampling_params["max_new_tokens"]
            return ({"meta_info": {"completion_tokens": n + 1}} for n in range(count))
        assert all(p["ignore_eos"] for p in sampling_params) and len(input_ids) == len(sampling_params)
        return [{"meta_info": {"completion_tokens": p["max_new_tokens"]}} for p in sampling_params]

    def shutdown(self):
        pass
"""


def test_sglang_is_called_as_its_offline_engine_wants(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    entrypoints = tmp_path / "site" / "sglang" / "srt" / "entrypoints"
    entrypoints.mkdir(parents=True)
    for folder in (entrypoints.parent, entrypoints):
        (folder / "__init__.py").touch()
    (tmp_path / "site" / "sglang" / "__init__.py").write_text('__version__ = "0.0.stand-in"')
    (entrypoints / "engine.py").write_text(SGLANG_STAND_IN)
    done = bench(
        "compare", "--model", tiny_model("llama"), "--dummy", "--device", "cpu", "--scale", "0.02", "--only", "W2",
        "--peer", "sglang", "--peer-path", tmp_path / "site", "--peer-extra", '{"disable_overlap_schedule": true}',
        "--out", tmp_path / "r.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = [r for r in read([tmp_path / "r.jsonl"]) if r.engine == "sglang"]
    assert {(r.version, r.dtype) for r in theirs} == {("0.0.stand-in", "bfloat16")}
    assert {r.workload for r in theirs} == {"startup", "W2"}


def test_an_engine_that_cuts_requests_short_has_no_figures(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT_BY", "1")
    done = with_stand_in(tiny_model("llama"), tmp_path)
    assert done.returncode == 1
    assert "asked for 2 tokens and got 1" in done.stderr
    kept = {(r.engine, r.workload, r.metric) for r in read([tmp_path / "r.jsonl"])}
    assert ("vllm", "startup", "ready") in kept, "what was measured before the failure"
    assert ("ridgeline", "W2", "tpot") in kept
    assert not {figure for figure in kept if figure[0] == "vllm" and figure[1] != "startup"}


@pytest.mark.dealt
def test_a_failing_engine_shows_the_end_of_its_log_and_keeps_what_came_before(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    done = bench(
        "compare", "--model", tiny_model("llama"), "--peer", "transformers", "--device", "cpu",
        "--scale", "0.02", "--only", "W2", "--out", out, "--peer-extra", '{"attn_implementation": "none such"}',
    )  # fmt: skip
    assert done.returncode == 2
    assert "failed during loading" in done.stderr
    assert "raise ValueError" in done.stderr, "the measuring process' own log"
    assert {r.engine for r in read([out])} == {"ridgeline"}


def record(value: float, samples: tuple[float, ...], **changes: str) -> Record:
    figure = {"engine": "ridgeline", "version": "1", "workload": "W2", "metric": "tpot", "unit": "ms", **changes}
    return Record(value=value, samples=samples, **figure)


def test_diff_of_files_judges_figures_with_enough_samples(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    times = tuple(1 + 0.001 * n for n in range(9))
    rate = {"metric": "output", "unit": "tokens/s", "better": "higher"}
    append(a, [record(1.0, times), record(1.0, times, **rate), record(1.0, (1.0,), metric="ttft")])
    doubled = tuple(2 * t for t in times)
    append(b, [record(2.0, doubled), record(2.0, doubled, **rate), record(1.0, (1.0,), metric="ttft")])
    done = bench("diff", a, b)
    lines = {word: line for line in done.stdout.splitlines() for word in ("tpot", "output", "ttft") if word in line}
    assert done.returncode == 1, done.stderr
    assert "slower: +100.0 %" in lines["tpot"]
    assert "faster" in lines["output"], "twice the rate is faster"
    assert "too few samples" in lines["ttft"]


def test_results_survive_the_file_and_nonsense_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, [record(1.5, (1.0, 2.0))])
    assert read([path]) == [record(1.5, (1.0, 2.0), date=read([path])[0].date)]
    with path.open("a") as file:
        file.write(json.dumps({"kind": "calibration", "device": "x"}) + "\n")
    assert len(read([path])) == 1, "calibrations may lie beside results"
    with path.open("a") as file:
        file.write(json.dumps({"engine": "x"}) + "\n")
    done = bench("diff", path, path)
    assert done.returncode == 2
    assert f"{path}:3" in done.stderr.replace("\n", "")


HIDDEN = """
import sys
from ridgeline.cli import main

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "ridgeline_bench":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
main()
"""


def test_without_the_package_of_measurements_one_sentence_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, "bench", "report", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "ridgeline_bench of version" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_old_names_of_scripts_run_them() -> None:
    command = [sys.executable, "-m", "benchmarks.jobs", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    assert "A queue of measurements" in done.stdout
