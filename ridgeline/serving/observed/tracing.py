"""Traces by OpenTelemetry (the extra `otel`): a span for each request, from its arrival to its end.

Names are OpenTelemetry's names for generative models where it has one. A thread sends the spans in batches. If the
collector is away, they are lost and nothing else happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ridgeline.serving.generation.service import Run
from ridgeline.serving.observed.breakdown import figures
from ridgeline.transport.messages import Ended
from ridgeline.version import __version__

DELAY = 1000  # milliseconds until a batch is sent
TIMEOUT = 3  # seconds that sending a batch may take; the server's end waits for the last one
PARTS = ("queue", "prefill", "decode", "host_gaps", "device", "headroom", "cached_tokens", "preemptions")

Observer = Callable[[Run, BaseException | None], None]


def observer(endpoint: str, model: str, instance: str) -> Observer:
    """Return the function to call with each run that has ended and the error that ended it.

    `endpoint` is "host:port" or a URL of OTLP over gRPC; the connection is encrypted if it begins with https.
    """
    resource = Resource.create(
        {"service.name": "ridgeline", "service.version": __version__, "service.instance.id": instance}
    )
    exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"), timeout=TIMEOUT)
    provider = TracerProvider(resource=resource)  # flushes when the process ends
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=DELAY))
    tracer, propagator = provider.get_tracer("ridgeline", __version__), TraceContextTextMapPropagator()

    def observe(run: Run, error: BaseException | None) -> None:
        now = time.time_ns()
        to_wall = now - time.monotonic_ns()
        span = tracer.start_span(
            f"text_completion {model}",
            context=propagator.extract(run.trace_parent),
            kind=SpanKind.SERVER,
            start_time=to_wall + round(1e9 * run.arrived),
        )
        if span.is_recording():
            _describe(span, run, model)
            for index, ended in enumerate(run.endings):
                if ended is not None:
                    _add_events(span, index, ended, to_wall)
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
                span.set_attribute("error.type", type(error).__name__)
        span.end(now)

    return observe


def _describe(span: Span, run: Run, model: str) -> None:
    """Describe the run in its span. Of several completions the one that took longest counts."""
    params, outputs = run.asked.params, run.result.outputs
    span.set_attributes(
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.id": run.asked.id,
            "gen_ai.response.finish_reasons": [output.finish_reason or "" for output in outputs],
            "gen_ai.usage.input_tokens": len(run.asked.prompt_token_ids),
            "gen_ai.usage.output_tokens": run.drawn_tokens,
        }
    )
    if params.max_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
    known = [ended for ended in run.endings if ended is not None]
    if known:
        longest = max(known, key=lambda ended: ended.stats.finished)
        parts = figures(longest.stats, longest.device)
        span.set_attributes({f"ridgeline.{name}": parts[name] for name in PARTS if parts[name] is not None})


def _add_events(span: Span, index: int, ended: Ended, to_wall: int) -> None:
    stats = ended.stats
    times = {"first scheduled": stats.first_scheduled, "first token": stats.first_token, "last token": stats.finished}
    for name, at in times.items():
        if at is not None:
            span.add_event(name, {"index": index}, timestamp=to_wall + round(1e9 * at))
