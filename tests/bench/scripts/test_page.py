"""The page of experiments: its commands are taken by their scripts, and what it predicts is what the planner says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.scripts import (
    batch_sweep,
    batching,
    chunk_sizes,
    experiments_page,
    formats_page,
    padded_experts,
)
from ridgeline_bench.scripts.driven import Driven
from ridgeline_bench.scripts.evidence.commands import commands, parser_of, problem
from ridgeline_bench.scripts.jobs import Job, read_jobs

QUEUE = Path(__file__).parents[3] / "benchmarks" / "experiments.txt"
WITHOUT_MODELS = {f"ridgeline_bench.scripts.{name}" for name in ("experiments_page", "jobs")}
PAGE = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text()


@pytest.mark.parametrize("job", read_jobs(QUEUE), ids=lambda job: job.name)
def test_a_job_s_commands_are_taken_and_keep_what_they_make(job: Job) -> None:
    shown = list(commands(job.command.replace("$OUT", "out")))
    assert len(shown) == job.command.count("&&") + 1
    assert [problem(command, whole=True) for command in shown] == [None] * len(shown)
    assert any(word.startswith("out/") for word in shown[-1].words)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"ridgeline_bench\.scripts\.\w+", PAGE)) - WITHOUT_MODELS))
def test_every_experiment_has_a_quick_form_and_keeps_its_lines(module: str) -> None:
    flags = {flag for action in parser_of(module)._actions for flag in action.option_strings}
    assert {"--quick", "--output"} <= flags


def test_the_page_explains_every_script_of_the_queue() -> None:
    scripts = {name for job in read_jobs(QUEUE) for name in re.findall(r"ridgeline_bench\.scripts\.\w+", job.command)}
    assert {name for name in scripts if name not in PAGE} == set()


@pytest.mark.parametrize(
    ("row", "tp", "dtype"), [("two H200s, bfloat16", 2, "bfloat16"), ("one H200, four bits", 1, "int4")]
)
def test_the_prediction_for_70b_is_the_planner_s(row: str, tp: int, dtype: str) -> None:
    spec = read_model_config(QUEUE.parent / "models" / "llama-70b").spec
    hardware = find("H200").attained()
    plan = Plan(Deployment(model=spec, hardware=hardware, input=1024, output=256, tp=tp, dtype=dtype))
    assert plan.best is not None
    alone, best = plan.point(1), plan.best
    cells = [
        row, f"{1e3 * alone.ttft:.0f} ms", f"{1e3 * alone.step:.1f} ms",
        f"{best.tokens_per_second:,.0f} ({best.batch} requests)", f"{best.tokens_per_second / tp:.0f}",
    ]  # fmt: skip
    assert f"| {' | '.join(cells)} |" in PAGE


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_those_of_the_stored_results() -> None:
    assert experiments_page.page(PAGE, experiments_page.stored(experiments_page.RESULTS)) == PAGE


def test_every_kind_of_line_that_scripts_store_becomes_a_table(driven: Driven) -> None:
    common = {"model": "m", "gpu": "G", "date": "2026-11-27T01:02:03"}
    made: list[dict[str, Any]] = [
        {"workload": "batching", **line} for line in batching.bench(driven, count=18, length=4, mean=4)
    ]
    made += [{"workload": "batch sweep", **line} for line in batch_sweep.bench(driven, [1, 2, 4], 4, 8, 4)]
    made += [{"workload": "chunk sizes", **line} for line in chunk_sizes.bench(driven, [16, 64], 4, 1, 64)]
    case = ExpertsCase(5, 16, 16, 4, 2)
    layer = padded_experts.Layer.random(case, torch.float32, torch.device("cpu"))
    effort = Effort(seconds=0.001, repeats=1)
    lines = padded_experts.bench(case, layer, torch.device("cpu"), effort)
    made += [{"workload": "padded experts", "shape": "tiny", **line} for line in lines]
    made.append({
        "workload": "formats page", "form": "bf16", "devices": 1, "weights_gb": 16.1, "ttft_ms": 30.0,
        "tokens_per_second": {"1": 100.0, "8": 700.0}, "limit_tokens_per_second": {"1": 200.0, "8": 1000.0},
    })  # fmt: skip
    made.append({
        "workload": "stacked gains", "step": "quantized", "tokens_per_second": 10.0, "gain": 1.5, "gain_in_all": 1.5,
        "steps": 9, "latency_mean_s": 2.0,
    })  # fmt: skip
    made += [
        {"workload": "mixture use", "form": "fp8-file",
         "memory": {"weights_gb": 47.0, "expert_share_of_parameters": 0.96}},
        {"workload": "mixture use", "form": "fp8-file", "routes": {"imbalance_of_layers": [1.1, 1.7]}},
        {"workload": "mixture use", "form": "fp8-file", "batch": 4, "tokens_per_second": 50.0, "step_ms": 80.0,
         "experts_with_tokens": 5.25, "uniform": 5.47, "limit_tokens_per_second": 100.0},
    ]  # fmt: skip
    most = {"workload": "serve completions 512>128 most within ttft=5", "machine": {"gpu": "G"},
            "options": {"slo": "ttft=5", "input_len": "512", "output_len": "128", "missing": 33.0}}  # fmt: skip
    made += [{**most, "metric": "requests", "value": 32.0}, {**most, "metric": "output", "value": 4000.0}]
    stored = [json.loads(json.dumps({**common, **line})) for line in made]
    text = experiments_page.page(PAGE, stored)
    for cells in (
        "| bf16 | 1 | 16.1 | 30.0 | 100 | 700 | 70 % | 6.673 |", "| quantized | 10 | 1.50 | 1.50 | 9 | 2.00 |",
        "| 4 | 5.25 | 5.47 | 80.00 | 50 | 50 % |", "experts are 96.0 % of the parameters",
        "1.10 to 1.70 times the mean", "times the rate of static ones", "that of quantized: 1.50 times",
        "m on G, 2026-11-27:", "33 requests/s miss it.", "| continuous |",
    ):  # fmt: skip
        assert cells in text, cells
    assert text.count("\n|---|") + text.count("\n| --- |") >= 9
    assert experiments_page.page(text, stored) == text, "written again it is the same"
    assert experiments_page.page(text, []) == experiments_page.page(PAGE, [])
    again = [*stored, {**stored[-1], "value": 5.0}]
    assert "with 5 output tokens/s" in " ".join(experiments_page.page(PAGE, again).split())


def test_a_page_without_a_place_for_a_table_is_said_so() -> None:
    with pytest.raises(SystemExit, match="no place for the table formats"):
        experiments_page.page("nothing", [])


# ---- figures that the text names ------------------------------------------------------------------------------------


def test_the_perplexities_of_the_page_are_those_that_are_stored() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (\d\.\d{3}) \|$", PAGE, re.MULTILINE)
    names = {
        "bfloat16": "plain:", "int8, SmoothQuant": "w8a8:smoothquant", "FP8": "fp8:rtn", "Q4_K_M": "gguf:q4_k_m",
        "GPTQ, 4 bits": "w4a16:gptq", "NVFP4": "nvfp4:rtn",
    }  # fmt: skip
    assert [name for name, _, _ in rows] == list(names)
    known = formats_page.stored_quality()
    assert {name: value for name, _, value in rows} == {name: f"{known[key]:.3f}" for name, key in names.items()}


def test_the_steps_of_the_quick_run_are_those_of_arithmetic() -> None:
    outputs = batching.lengths(16, 12)
    assert f"took {batching.static_steps(outputs, 4)} steps with static batches, as computed" in " ".join(PAGE.split())
    assert f"at least {batching.continuous_steps(outputs, 4)} are needed" in " ".join(PAGE.split())


def test_uniform_routing_reaches_as_many_experts_as_the_page_says() -> None:
    reached = [touched(batch, 8, 2) for batch in (1, 4, 16)]
    assert "2 of 8 for one request, {1:.1f} for four and {2:.1f} for sixteen".format(*reached) in " ".join(PAGE.split())
