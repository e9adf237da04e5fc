"""The results of an evaluation, as lines of a result file (`ridgeline_bench/results.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.llm import LLM
from ridgeline.version import __version__
from ridgeline_bench.quality.likelihood import Cut
from ridgeline_bench.quality.perplexity import TextScore
from ridgeline_bench.results import Record, host_with


def base(llm: LLM, **options: Any) -> Record:
    """Return the fields that all figures of one model have in common."""
    return Record(
        engine="ridgeline",
        version=__version__,
        model=model_name(llm),
        dtype=llm.assembly.dtype,
        machine=host_with(llm.assembly.device),
        options=options,
        workload="",
        metric="",
        value=0.0,
        unit="",
    )


def model_name(llm: LLM) -> str:
    """Return the model's name as the user gave it, or the folder's own name if it is one."""
    given = str(llm.config.model)
    return (Path(given).name if Path(given).is_dir() else given) or "embedded"


def figures(base: Record, workload: str, values: Mapping[str, tuple[float, str, str]]) -> list[Record]:
    """Return one record for each metric: (value, unit, which is better)."""
    return [
        replace(base, workload=workload, metric=metric, value=value, unit=unit, better=better, samples=(value,))
        for metric, (value, unit, better) in values.items()
    ]


def perplexity_records(llm: LLM, scores: list[TextScore], cut: Cut) -> list[Record]:
    """Return the records of every file, and of all together."""
    known = base(llm, window=cut.window, stride=cut.stride)
    return [
        record
        for score in scores
        for record in figures(
            replace(known, options={**known.options, "tokens": score.num_tokens, "bytes": score.num_bytes}),
            f"perplexity:{Path(score.name).name}",
            {
                "perplexity": (score.perplexity, "per token", "lower"),
                "bits_per_byte": (score.bits_per_byte, "bits/byte", "lower"),
                "tokens_per_second": (score.tokens_per_second, "tokens/s", "higher"),
            },
        )
    ]


def task_records(llm: LLM, found: Mapping[str, Any], **options: Any) -> list[Record]:
    """Return the records of every task's metrics, from the harness' results."""
    records = []
    for task, metrics in found["results"].items():
        higher = found.get("higher_is_better", {}).get(task, {})
        for name, value in metrics.items():
            metric, _, filter_name = name.partition(",")
            if not isinstance(value, (int, float)) or not filter_name or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            known = base(llm, **options, filter=filter_name, stderr=stderr if isinstance(stderr, float) else None)
            better = "lower" if higher.get(metric) is False else "higher"
            records += figures(known, f"harness:{task}", {metric: (float(value), metric, better)})
    return records
