"""The rules by which a run of MLPerf Inference counts, over the logs that LoadGen writes.

The numbers are those that LoadGen 6.0 carries for Llama-3.1-8B (mlperf.conf), the rules those of MLCommons' submission
checker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIDENCE = 0.99  # of early stopping


@dataclass(frozen=True)
class Rules:
    """The bounds of a run that counts. ttft, tpot: in milliseconds. accuracy: the share of the reference's score."""

    seconds: float = 600.0
    offline_samples: int = 13_368
    percentile: float = 0.99
    ttft: float = 2000.0
    tpot: float = 100.0
    accuracy: float = 0.99


def details(folder: Path) -> dict[str, Any]:
    """Return the values of mlperf_log_detail.txt by key, the last of each, and "errors": the values of lines that are
    errors."""
    lines = (folder / "mlperf_log_detail.txt").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]
    errors = [each["value"] for each in found if each.get("metadata", {}).get("is_error")]
    return {**{each["key"]: each["value"] for each in found}, "errors": errors}


def answers(folder: Path) -> list[tuple[int, list[int]]]:
    """Return the entries of mlperf_log_accuracy.json: the number of each sample, and the tokens of its answer."""
    text = (folder / "mlperf_log_accuracy.json").read_text(encoding="utf-8")
    return [(each["qsl_idx"], tokens(each["data"])) for each in json.loads(text or "[]")]


def tokens(data: str) -> list[int]:
    """Return the int32 numbers, low byte first, that LoadGen writes as hexadecimal digits."""
    raw = bytes.fromhex(data)
    return [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw), 4)]


def needed(late: int, percentile: float, confidence: float = CONFIDENCE) -> int:
    """Return the queries of which `late` may exceed a bound, so that with this confidence the true share of queries
    within the bound is at least `percentile`: the least n with P(Binomial(n, 1 - percentile) ≤ late) ≤ 1 - confidence.
    """
    n = late + 1
    while _at_most(late, n, 1 - percentile) > 1 - confidence:
        n += 1
    return n


def _at_most(late: int, n: int, share: float) -> float:
    logs = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(share) + (n - k) * math.log1p(-share)
        for k in range(late + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, logs))


def faults(folder: Path, rules: Rules) -> list[str]:
    """Return a sentence for each rule that the run in this folder breaks; none if it counts."""
    found = details(folder)
    if found["errors"] or found.get("num_errors"):
        return [f"LoadGen reports errors: {'; '.join(map(str, found['errors']))}"]
    if "power_end" not in found:
        return ["the run did not end"]
    if found["effective_test_mode"] == "AccuracyOnly":
        return list(_of_accuracy(folder, found))
    if found["effective_test_mode"] != "PerformanceOnly":
        return [f"the mode is {found['effective_test_mode']}, not PerformanceOnly or AccuracyOnly"]
    server = found["effective_scenario"] == "Server"
    return [*_of_performance(folder, found, rules), *(_of_server if server else _of_offline)(found, rules)]


def _of_accuracy(folder: Path, found: Mapping[str, Any]) -> Iterator[str]:
    numbers, count = sorted(number for number, _ in answers(folder)), found["qsl_reported_total_count"]
    if numbers != list(range(count)):
        yield f"an accuracy run answers each of {count} samples once, and this one has {len(numbers)} answers"


def _of_performance(folder: Path, found: Mapping[str, Any], rules: Rules) -> Iterator[str]:
    if answers(folder):
        yield "a performance run writes no answers"
    if found["effective_min_duration_ms"] < 1000 * rules.seconds:
        yield f"{found['effective_min_duration_ms'] / 1000:g} s were asked for, and {rules.seconds:g} s are the least"
    if not found["result_min_duration_met"]:
        yield "the run was shorter than it was asked to be"
    if not found["result_min_queries_met"]:
        yield "the run had fewer queries than it was asked to have"
    if found["result_validity"] != "VALID":
        yield f"LoadGen calls the run {found['result_validity']}"


def _of_offline(found: Mapping[str, Any], rules: Rules) -> Iterator[str]:
    if (samples := found["effective_samples_per_query"]) < rules.offline_samples:
        yield f"the query had {samples} samples, and {rules.offline_samples} are the least"


def _of_server(found: Mapping[str, Any], rules: Rules) -> Iterator[str]:
    if found["effective_target_latency_percentile"] < rules.percentile:
        yield f"the percentile is {found['effective_target_latency_percentile']}, not {rules.percentile}"
    name = f"{100 * rules.percentile:.2f}_percentile"
    for what, asked, got, bound in (
        ("first token", "requested_server_ttft_latency", f"result_first_token_{name}_latency_ns", rules.ttft),
        ("time per token", "requested_server_tpot_latency", f"result_time_per_output_token_{name}_ns", rules.tpot),
    ):
        if max(found[asked], found[got]) > 1e6 * bound:
            yield f"{what}: {found[got] / 1e6:.1f} ms within {found[asked] / 1e6:g}, and {bound:g} ms are the most"
    count, least = found["result_query_count"], needed(0, rules.percentile)
    if count < least:
        yield f"early stopping takes {least} queries even if none is late, and the run had {count}"
    elif not found["early_stopping_met"]:
        said = (found.get(f"early_stopping_{bound}_result", "") for bound in ("ttft", "tpot"))
        yield f"LoadGen's early stopping is not met: {' '.join(' '.join(said).split())}"
