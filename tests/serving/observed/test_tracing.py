"""Traces as a real receiver gets them: OTLP over gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2
from ridgeline.version import __version__
from tests.serving.apis.grpc.grpc_server import serve_grpc
from tests.serving.conftest import MODEL, Server, StartServer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": list(range(5, 45)), "max_tokens": 20, "ignore_eos": True, "temperature": 0.5}


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    spans: dict[str, Span] = field(default_factory=dict)  # by request id
    resource: dict[str, Any] = field(default_factory=dict)
    port: int = 0

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for of_resource in request.resource_spans:
            self.resource |= values(of_resource.resource.attributes)
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                self.spans[values(span.attributes)["gen_ai.response.id"]] = span
        return trace_service_pb2.ExportTraceServiceResponse()

    def span(self, name: str) -> Span:
        deadline = time.monotonic() + 120
        while name not in self.spans:
            assert time.monotonic() < deadline, f"no span of {name}, only {list(self.spans)}"
            time.sleep(0.02)
        return self.spans[name]


def values(attributes: list[KeyValue]) -> dict[str, Any]:
    def plain(value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: plain(each.value) for each in attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found, server = Receiver(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found
    server.stop(0).wait()


@pytest.fixture(scope="module")
def traced(start_server: StartServer, receiver: Receiver) -> Iterator[Server]:
    with start_server(otlp_endpoint=f"http://127.0.0.1:{receiver.port}") as server:
        yield server


def complete(server: Server, name: str, headers: dict[str, str] | None = None, **fields: object) -> dict[str, Any]:
    headers = {"x-request-id": name} | (headers or {})
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_span_says_when_what_happened(traced: Server, receiver: Receiver) -> None:
    began = time.time_ns()
    told = complete(traced, "traced", include_breakdown=True)["ridgeline"]["completions"][0]
    ended = time.time_ns()
    span = receiver.span("traced")
    found = values(span.attributes)
    assert span.name == f"text_completion {MODEL}"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.parent_span_id == b""
    assert {name: found[name] for name in found if name.startswith("gen_ai")} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.response.id": "traced",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 20,
    }
    for name in ("queue", "prefill", "decode", "host_gaps", "device", "cached_tokens", "preemptions"):
        assert found[f"ridgeline.{name}"] == told[name], name
    events = {event.name: event.time_unix_nano for event in span.events}
    times = [began, span.start_time_unix_nano, *events.values(), span.end_time_unix_nano, ended]
    assert times == sorted(times)
    assert list(events) == ["first scheduled", "first token", "last token"]
    assert events["first token"] - events["first scheduled"] == pytest.approx(1e9 * told["prefill"], abs=1e4)
    assert events["last token"] - events["first token"] == pytest.approx(1e9 * told["decode"], abs=1e4)
    assert receiver.resource["service.name"] == "ridgeline"
    assert receiver.resource["service.version"] == __version__
    assert receiver.resource["service.instance.id"] == traced.api.client.name


def test_a_span_belongs_to_its_clients_trace(traced: Server, receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
    complete(traced, "child", headers, n=2, temperature=1)
    span = receiver.span("child")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=x")
    assert [values(event.attributes)["index"] for event in span.events] == [0, 0, 0, 1, 1, 1]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with httpx.stream(
        "POST",
        f"{traced.url}/v1/chat/completions",
        json=chat | {"stream": True},
        headers=headers | {"x-request-id": "chat-child"},
    ) as stream:
        stream.read()
    assert receiver.span("chat-child").trace_id.hex() == TRACE


def test_what_a_client_does_not_want_traced_is_not_and_nonsense_is_no_trace(traced: Server, receiver: Receiver) -> None:
    complete(traced, "unwanted", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    complete(traced, "nonsense", {"traceparent": "00-zz-1-01", "tracestate": "x" * 20_000})
    span = receiver.span("nonsense")
    assert (span.trace_id.hex() != TRACE, span.parent_span_id) == (True, b"")
    time.sleep(0.1)
    assert "unwanted" not in receiver.spans, "it ended before the one that came"


def test_a_request_whose_client_left_is_an_error(traced: Server, receiver: Receiver) -> None:
    body = BODY | {"max_tokens": 1800, "stream": True}
    url, headers = f"{traced.url}/v1/completions", {"x-request-id": "left"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as stream:
        next(stream.iter_lines())
    span = receiver.span("left")
    assert span.status.code == Status.STATUS_CODE_ERROR
    found = values(span.attributes)
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < found["gen_ai.usage.output_tokens"] < 1800


def test_grpc_calls_are_traced_alike(engine_socket: Path, receiver: Receiver) -> None:
    with serve_grpc(engine_socket, otlp_endpoint=f"127.0.0.1:{receiver.port}") as server:
        request = inference_pb2.GenerateRequest(text="hello", request_id="by-grpc")
        metadata = [("traceparent", f"00-{TRACE}-{PARENT}-01")]
        assert list(server.stub.Generate(request, metadata=metadata, timeout=120))
        span = receiver.span("by-grpc")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_a_receiver_that_is_not_there_harms_no_request(start_server: StartServer) -> None:
    with start_server(otlp_endpoint="http://127.0.0.1:9") as server:
        for number in range(3):
            began = time.monotonic()
            complete(server, f"unseen-{number}")
            assert time.monotonic() - began < 30
