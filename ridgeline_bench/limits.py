"""The hardware's limit for a workload: the sum of the limits of the fewest steps that can do it.

Legend:
    R  rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import CostModel, StepShape
from ridgeline.kernels.base.weight_format import HeldMatrix
from ridgeline.perf import calibration
from ridgeline.perf.hardware import Hardware, find, from_device_name
from ridgeline.perf.held import held_precision
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import Roofline
from ridgeline_bench.results import Record
from ridgeline_bench.workloads import Metric, Phase, Workload


def hardware_named(device: str) -> Hardware | None:
    """Return a device by its driver's (or system's) name, at the rates it attains, or None if they are unknown.

    The rates come from its calibration, else from what is known of its kind. The name serves because asking the device
    itself would take memory from the engine under test.
    """
    try:
        known = from_device_name(device)
    except InvalidConfig:
        known = None
    if (own := calibration.load(device)) is not None:
        return (known or find("CPU")).with_calibration(own)
    return known.attained() if known is not None and known.name != "CPU" else None


def with_limits(
    records: Iterable[Record],
    made: Iterable[Workload],
    spec: ModelSpec,
    hardware: Hardware | None,
    forms: Mapping[str, HeldMatrix] | None = None,
) -> list[Record]:
    """Return the records, with limits for those of `made` if the hardware's are known in the record's dtype. forms: how
    a quantized model's weights are held."""
    records = list(records)
    if hardware is None or not records:
        return records
    try:
        model = Roofline(spec, hardware, held_precision(precision(records[0].dtype), spec, forms or {}))
    except InvalidConfig:
        return records
    limits = {(w.name, name): metric.value for w in made for name, metric in limit_metrics(w, model).items()}
    return [replace(r, limit=limits.get((r.workload, r.metric), r.limit)) for r in records]


def limit_metrics(workload: Workload, model: CostModel) -> dict[str, Metric]:
    """Return the workload's figures if every phase ran at its limit, by metric name."""
    times = {phase.name: phase_limit(phase, model) for phase in workload.phases}
    return {metric.name: metric for metric in workload.metrics(times)}


def phase_limit(phase: Phase, model: CostModel) -> float:
    """Return the least seconds of a phase: all prompts in one step, then one step per token for the requests that still
    run.

    A beginning that requests share is computed once, and read once a step. There is no memory bound on the batch.
    """
    lengths_R, shared = np.array([len(prompt) for prompt in phase.prompts]), _shared(phase.prompts)
    return model.step_limit(_prefill(lengths_R, shared)) + sum(
        model.step_limit(shape) for shape in _decodes(lengths_R, np.array(phase.max_tokens), shared)
    )


def _prefill(lengths_R: np.ndarray, shared: int) -> StepShape:
    known = min(shared, int(lengths_R.min()) - 1)  # the last token of every prompt has to run
    new_R = lengths_R - known
    new_R[0] = lengths_R[0]
    return StepShape(new_R, lengths_R, len(lengths_R), shared)


def _decodes(lengths_R: np.ndarray, max_tokens_R: np.ndarray, shared: int) -> list[StepShape]:
    shapes = []
    for step in range(1, int(max_tokens_R.max())):
        kv_R = lengths_R[max_tokens_R > step] + step
        shapes.append(StepShape(np.ones_like(kv_R), kv_R, len(kv_R), shared))
    return shapes


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all prompts begin with, or 0 for a single prompt, which shares none."""
    if len(prompts) < 2:
        return 0
    # in lexical order, so all others agree where these two do
    first, last = min(map(list, prompts)), max(map(list, prompts))
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
