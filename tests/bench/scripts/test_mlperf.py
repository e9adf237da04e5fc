"""MLPerf Inference: the rules by hand arithmetic, and LoadGen's own logs of a tiny engine."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ridgeline_bench.scripts import mlperf
from ridgeline_bench.scripts.driven import Driven, Wanted
from ridgeline_bench.scripts.mlperf import Asked, Sample, System
from ridgeline_bench.scripts.mlperf_rules import Rules, answers, details, faults, needed, tokens

ROOT = Path(__file__).parents[3]
STORED = ROOT / "benchmarks" / "results" / "mlperf-cpu.jsonl"

PERFORMANCE: dict[str, Any] = {
    "num_errors": 0, "power_end": "", "effective_test_mode": "PerformanceOnly", "effective_min_duration_ms": 600_000,
    "result_min_duration_met": True, "result_min_queries_met": True, "result_validity": "VALID",
    "qsl_reported_total_count": 2,
}  # fmt: skip
OFFLINE = {**PERFORMANCE, "effective_scenario": "Offline", "effective_samples_per_query": 13_368}
SERVER = {
    **PERFORMANCE, "effective_scenario": "Server", "effective_target_latency_percentile": 0.99,
    "requested_server_ttft_latency": 2 * 10**9, "requested_server_tpot_latency": 10**8,
    "result_first_token_99.00_percentile_latency_ns": 2 * 10**9,
    "result_time_per_output_token_99.00_percentile_ns": 10**8, "result_query_count": 459, "early_stopping_met": True,
}  # fmt: skip
ACCURACY = {**OFFLINE, "effective_test_mode": "AccuracyOnly"}
BOTH = [{"qsl_idx": 1, "data": "01000000"}, {"qsl_idx": 0, "data": "ff000000feffffff"}]


def written(folder: Path, values: dict[str, Any], accuracy: list[dict[str, Any]], *, error: bool = False) -> Path:
    lines = [{"key": key, "value": value, "metadata": {"is_error": False}} for key, value in values.items()]
    lines += [{"key": "error_runtime", "value": "boom", "metadata": {"is_error": True}}] if error else []
    (folder / "mlperf_log_detail.txt").write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines))
    (folder / "mlperf_log_accuracy.json").write_text(json.dumps(accuracy))
    return folder


@pytest.mark.parametrize(("late", "queries"), [(0, 459), (1, 662)])
def test_early_stopping_takes_as_many_queries_as_published(late: int, queries: int) -> None:
    assert needed(late, 0.99) == queries


@pytest.mark.parametrize("percentile", [Fraction(9, 10), Fraction(99, 100)])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_early_stopping_is_the_exact_tail_of_the_binomial(late: int, percentile: Fraction) -> None:
    def tail(n: int) -> Fraction:
        return sum(
            (math.comb(n, k) * (1 - percentile) ** k * percentile ** (n - k) for k in range(late + 1)), Fraction(0)
        )

    n = needed(late, float(percentile))
    assert tail(n) <= Fraction(1, 100) < tail(n - 1)


@pytest.mark.parametrize(("values", "accuracy"), [(OFFLINE, []), (SERVER, []), (ACCURACY, BOTH)])
def test_a_run_that_keeps_to_the_rules_has_no_faults(
    values: dict[str, Any], accuracy: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert faults(written(tmp_path, values, accuracy), Rules()) == []


@pytest.mark.parametrize(
    ("values", "change", "accuracy", "word"),
    [
        (OFFLINE, {"effective_samples_per_query": 13_367}, [], "13367 samples"),
        (OFFLINE, {"effective_min_duration_ms": 599_999}, [], "600 s are the least"),
        (OFFLINE, {"result_min_duration_met": False}, [], "shorter than"),
        (OFFLINE, {"result_min_queries_met": False}, [], "fewer queries"),
        (OFFLINE, {"result_validity": "INVALID"}, [], "INVALID"),
        (OFFLINE, {"num_errors": 3}, [], "errors"),
        (OFFLINE, {"effective_test_mode": "SubmissionRun"}, [], "SubmissionRun"),
        (OFFLINE, {}, BOTH, "writes no answers"),
        (SERVER, {"effective_target_latency_percentile": 0.97}, [], "0.97"),
        (SERVER, {"result_first_token_99.00_percentile_latency_ns": 2 * 10**9 + 10**6}, [], "first token: 2001.0"),
        (SERVER, {"requested_server_tpot_latency": 2 * 10**8}, [], "time per token"),
        (SERVER, {"result_query_count": 458}, [], "takes 459 queries"),
        (SERVER, {"early_stopping_met": False}, [], "early stopping is not met"),
        (ACCURACY, {}, BOTH[:1], "1 answers"),
        (ACCURACY, {}, [BOTH[0], BOTH[0]], "2 answers"),
    ],
)
def test_each_broken_rule_is_named(
    values: dict[str, Any], change: dict[str, Any], accuracy: list[dict[str, Any]], word: str, tmp_path: Path
) -> None:
    [found] = faults(written(tmp_path, values | change, accuracy), Rules())
    assert word in found


def test_an_error_and_a_run_without_an_end_do_not_count(tmp_path: Path) -> None:
    assert "boom" in faults(written(tmp_path, ACCURACY, BOTH, error=True), Rules())[0]
    unfinished = {key: value for key, value in ACCURACY.items() if key != "power_end"}
    assert faults(written(tmp_path, unfinished, BOTH), Rules()) == ["the run did not end"]


def test_answers_are_little_endian_numbers() -> None:
    assert tokens(BOTH[1]["data"]) == [255, -2]


def test_the_score_is_the_mean_share_up_to_the_first_token_that_differs() -> None:
    samples = [Sample([0], [1, 2, 3, 4])] * 3
    assert mlperf.score(samples, [[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]]) == pytest.approx((1 + 1 / 4 + 0) / 3)


def test_loadgen_asks_the_engine_and_its_logs_keep_to_the_rules(driven: Driven, tmp_path: Path) -> None:
    lg = pytest.importorskip("mlperf_loadgen", reason="mlcommons-loadgen is not installed")
    samples = [Sample(prompt, []) for prompt in driven.prompts(6, 8)]
    system = System(lg, driven, samples, tokens=3)
    rules = Rules(seconds=0.5, offline_samples=20, percentile=0.5, ttft=20_000, tpot=20_000)
    for scenario in mlperf.SCENARIOS:
        mlperf.run(system, Asked(scenario, 100.0 if scenario == "server" else 2000.0, rules, 20), tmp_path / scenario)
        assert faults(tmp_path / scenario, rules) == []
    assert len(faults(tmp_path / "server", Rules())) >= 4
    assert details(tmp_path / "server")["result_query_count"] >= 20
    assert mlperf.figures(tmp_path / "offline")["samples"] >= 20
    alone = [_alone(driven, sample.prompt) for sample in samples]
    assert dict(answers(tmp_path / "accuracy")) == dict(enumerate(alone))


def _alone(driven: Driven, prompt: list[int]) -> list[int]:
    """The tokens of one request that runs alone."""
    driven.add(Wanted(prompt, 3))
    found = []
    while driven.engine.has_work:
        found += [event.token_id for event in driven.engine.step() if event.token_id >= 0]
    return found


def test_a_missing_loadgen_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mlperf.sys.modules, "mlperf_loadgen", None)
    with pytest.raises(mlperf.InvalidConfig, match=r"pip install 'ridgeline\[mlperf\]'"):
        mlperf.loadgen()


def test_the_page_has_the_stored_figures() -> None:
    page = (ROOT / "docs" / "mlperf.md").read_text()
    lines = {line["scenario"]: line for line in map(json.loads, STORED.read_text().splitlines())}
    offline, server, accuracy = (lines[name] for name in mlperf.SCENARIOS)
    assert [line["faults"] for line in lines.values()] == [[], [], []]
    assert f"| {offline['samples_per_second']:.0f} samples/s, {offline['tokens_per_second']:.0f} tokens/s |" in page
    assert f"| {server['ttft_p99_ms']:.0f} ms, {server['tpot_p99_ms']:.0f} ms |" in page
    assert f"| {accuracy['score']:.4f}, the reference's {accuracy['reference']:.4f} |" in page
