"""An engine's figures on Triton's page of metrics, by the names that they have at our own server's /metrics."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from ridgeline.transport.messages import Stats

GAUGES = {
    "vllm:num_requests_running": "Requests that steps advance.",
    "vllm:num_requests_waiting": "Requests that wait for room.",
}
COUNTERS = {
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    "vllm:generation_tokens_total": "Tokens that were generated.",
    "vllm:request_success_total": "Requests that ended, by why.",
}


class Figures:
    """The figures of one instance. `labels` are those of all its metrics."""

    def __init__(self, **labels: str) -> None:
        kinds = dict.fromkeys(GAUGES, pb_utils.MetricFamily.GAUGE) | dict.fromkeys(
            COUNTERS, pb_utils.MetricFamily.COUNTER
        )
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=kinds[name])
            for name, text in (GAUGES | COUNTERS).items()
        }
        self._labels = labels
        self._metrics: dict[tuple[str, str], Any] = {}
        self._counted: dict[tuple[str, str], float] = {}
        self._started = 0.0

    def show(self, stats: Stats) -> None:
        if stats.started != self._started:  # another engine counts from 0
            self._started = stats.started
            self._counted.clear()
        self._metric("vllm:num_requests_running").set(stats.running)
        self._metric("vllm:num_requests_waiting").set(stats.waiting)
        for name in ("prompt_tokens", "generation_tokens"):
            self._count(f"vllm:{name}_total", stats.counters[name])
        for reason, number in stats.finished.items():
            self._count("vllm:request_success_total", number, reason)

    def rest(self) -> None:
        """Show that no request is open. Counters go on with the next one."""
        for name in GAUGES:
            self._metric(name).set(0)

    def _count(self, name: str, value: float, reason: str = "") -> None:
        """Bring a counter to what the engine counts."""
        metric = self._metric(name, reason)
        metric.increment(value - self._counted.get((name, reason), 0.0))
        self._counted[name, reason] = value

    def _metric(self, name: str, reason: str = "") -> Any:
        if (name, reason) not in self._metrics:
            labels = {**self._labels, **({"finished_reason": reason} if reason else {})}
            self._metrics[name, reason] = self._families[name].Metric(labels=labels)
        return self._metrics[name, reason]
