"""The router's metrics, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.serving.router.budget import ByteBudget
from ridgeline.serving.router.workers import Workers

WORKER = ["worker"]


class _Figures(Collector):
    def __init__(self, workers: Workers, budget: ByteBudget) -> None:
        self._workers, self._budget = workers, budget

    def collect(self) -> Iterator[Metric]:
        each = self._workers.each
        for name, text, values in (
            ("up", "1 if the worker takes requests.", [float(worker.ready) for worker in each]),
            ("outstanding", "Open requests of the worker.", [len(worker.open) for worker in each]),
            ("outstanding_tokens", "Tokens of its open requests, about.", [worker.tokens for worker in each]),
        ):
            gauge = GaugeMetricFamily(f"ridgeline:router_worker_{name}", text, labels=WORKER)
            for worker, value in zip(each, values, strict=True):
                gauge.add_metric([worker.url], value)
            yield gauge
        chosen = CounterMetricFamily("ridgeline:router_worker_chosen", "Requests sent to the worker.", labels=WORKER)
        text = "Requests that failed at the worker: no connection, lost before or in its answer, ended by the router."
        errors = CounterMetricFamily("ridgeline:router_worker_errors", text, labels=[*WORKER, "kind"])
        for worker in each:
            chosen.add_metric([worker.url], worker.chosen)
            for kind in ("connect", "lost", "stream", "ended"):
                errors.add_metric([worker.url, kind], worker.errors[kind])
        yield from (chosen, errors)
        yield CounterMetricFamily(
            "ridgeline:router_retries", "Requests that went on to another worker.", value=self._workers.retries
        )
        yield CounterMetricFamily(
            "ridgeline:router_refused_for_memory", "Requests beyond the bytes held.", value=self._budget.refused
        )
        yield GaugeMetricFamily("ridgeline:router_buffered_bytes", "Bytes of open requests.", value=self._budget.used)


def page(workers: Workers, budget: ByteBudget) -> bytes:
    """Return the text of /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(workers, budget))
    return generate_latest(registry)
