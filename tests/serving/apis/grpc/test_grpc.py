"""The gRPC service as real clients see it, against the offline API's answers and those of the HTTP API."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

from ridgeline import LLM, SamplingParams
from ridgeline.serving import owner
from ridgeline.serving.apis.grpc import guard
from ridgeline.serving.grpc.proto import kserve_pb2 as kserve
from ridgeline.serving.grpc.proto import kserve_pb2_grpc
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2_grpc
from ridgeline.version import __version__
from tests.serving.apis.grpc.grpc_server import GrpcServer, serve_grpc
from tests.serving.clients.asked import needing
from tests.serving.conftest import DTYPE, MODEL, PATIENCE, Server, start_engine, stop_engine

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self, item):", "import os\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=2)
LONG = pb.Sampling(max_tokens=1500, ignore_eos=True)  # takes seconds
Code = grpc.StatusCode
SERVICES = ("ridgeline.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health")


@pytest.fixture(scope="module")
def served(engine_socket: Path) -> Iterator[GrpcServer]:
    with serve_grpc(engine_socket) as running:
        yield running


@pytest.fixture(scope="module")
def offline() -> dict[str, Any]:
    """Greedy answers of the offline API, by prompt."""
    return dict(zip(PROMPTS, LLM(dtype=DTYPE).generate(PROMPTS, GREEDY), strict=True))


def generate(served: GrpcServer, **fields: Any) -> list[pb.GenerateResponse]:
    return list(served.stub.Generate(pb.GenerateRequest(**fields), timeout=PATIENCE))


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(each.piece.text for each in responses if each.HasField("piece") and each.piece.index == index)


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [i for each in responses if each.HasField("piece") for i in each.piece.token_ids]


def finishes(responses: list[pb.GenerateResponse]) -> list[pb.Finish]:
    return [each.finish for each in responses if each.HasField("finish")]


def greedy(max_tokens: int = 24, **more: Any) -> pb.Sampling:
    return pb.Sampling(temperature=0, max_tokens=max_tokens, **more)


def trailing(error: grpc.RpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())


def fails(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


# ---- answers ------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_offline_answer_in_pieces(served: GrpcServer, offline: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        want = offline[prompt]
        ids = pb.TokenIds(ids=want.prompt_token_ids)
        for given in ({"text": prompt}, {"token_ids": ids}):
            responses = generate(served, sampling=greedy(), **given)
            assert len(responses) > 5, "one piece is no stream"
            assert text_of(responses) == want.outputs[0].text
            assert ids_of(responses) == want.outputs[0].token_ids
            [finish] = finishes(responses)
            assert finish.reason == want.outputs[0].finish_reason
            assert finish.usage.prompt_tokens == len(want.prompt_token_ids)
            assert finish.usage.completion_tokens == len(want.outputs[0].token_ids)
            assert responses[-1].HasField("finish")
            assert len({each.request_id for each in responses}) == 1


def test_a_chat_is_the_offline_one(served: GrpcServer) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    want = LLM(dtype=DTYPE).chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
    responses = generate(served, model="alias", chat=chat, sampling=greedy(20))
    assert text_of(responses) == want.text
    assert finishes(responses)[0].reason == want.finish_reason


def test_several_completions_are_those_of_the_http_server(served: GrpcServer, server: Server) -> None:
    want = server.client.completions.create(model=MODEL, prompt="x =", n=3, seed=5, max_tokens=12)
    responses = generate(served, text="x =", sampling=pb.Sampling(n=3, seed=5, max_tokens=12))
    assert [text_of(responses, index) for index in range(3)] == [choice.text for choice in want.choices]
    assert sorted(finish.index for finish in finishes(responses)) == [0, 1, 2]


def test_many_asyncio_streams_at_once_are_the_offline_answers(served: GrpcServer, offline: dict[str, Any]) -> None:
    async def ask(stub: inference_pb2_grpc.InferenceStub, prompt: str) -> str:
        request = pb.GenerateRequest(text=prompt, sampling=greedy())
        return text_of([each async for each in stub.Generate(request)])

    async def ask_all() -> list[str]:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return await asyncio.gather(*(ask(stub, prompt) for prompt in PROMPTS * 16))

    assert served.run(ask_all()) == [offline[prompt].outputs[0].text for prompt in PROMPTS * 16]
    assert served.wait_idle()


def test_logprobs_are_the_offline_ones(served: GrpcServer, offline: dict[str, Any]) -> None:
    prompt = PROMPTS[0]
    want = offline[prompt]
    responses = generate(served, text=prompt, sampling=greedy(logprobs=3, prompt_logprobs=2))

    def check(told: list[pb.PositionLogprobs], ids: list[int], entries: list[Any], top: int) -> None:
        assert [position.chosen.token_id for position in told] == ids
        for position, token_id, entry in zip(told, ids, entries, strict=True):
            assert position.chosen.logprob == pytest.approx(entry[token_id].logprob, abs=1e-4)
            assert position.chosen.rank == entry[token_id].rank
            assert position.chosen.token == entry[token_id].decoded_token
            assert len(position.top) == top
            best = sorted((each.logprob for each in entry.values()), reverse=True)[:top]
            assert [each.logprob for each in position.top] == pytest.approx(best, abs=1e-4)

    assert responses[0].HasField("prompt_logprobs")
    check(
        list(responses[0].prompt_logprobs.positions), list(want.prompt_token_ids[1:]), want.prompt_logprobs[1:], top=2
    )
    told = [position for each in responses for position in each.piece.logprobs]
    check(told, want.outputs[0].token_ids, want.outputs[0].logprobs, top=3)


def test_stops_are_named(served: GrpcServer, offline: dict[str, Any]) -> None:
    responses = generate(served, text=PROMPTS[0], sampling=greedy(60, stop=["never", "\n"]))
    [finish] = finishes(responses)
    assert (finish.reason, finish.stop_string) == ("stop", "\n")
    assert "\n" not in text_of(responses)
    fifth = offline[PROMPTS[0]].outputs[0].token_ids[4]
    [finish] = finishes(generate(served, text=PROMPTS[0], sampling=greedy(60, stop_token_ids=[fifth])))
    assert (finish.reason, finish.stop_token_id) == ("stop", fifth)
    assert finish.usage.completion_tokens <= 5
    assert served.wait_idle()


def test_output_keeps_its_structure(served: GrpcServer) -> None:
    def written(**kind: Any) -> str:
        structure = pb.StructuredOutputs(**kind)
        return text_of(generate(served, text="=", sampling=pb.Sampling(max_tokens=40), structured_outputs=structure))

    assert written(choice=pb.Choices(options=["yes", "no"])) in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", written(regex="[0-9]{3}-[0-9]{2}"))
    assert written(json='{"enum": [17]}') == "17"
    assert written(grammar='start: "a" "b"') == "ab"


def test_a_breakdown_is_told_where_it_is_asked_for(served: GrpcServer) -> None:
    [plain] = finishes(generate(served, text="x", sampling=greedy(8)))
    assert not plain.HasField("breakdown")
    began = time.monotonic()
    [finish] = finishes(generate(served, text="x", sampling=greedy(8), breakdown=True))
    took = time.monotonic() - began
    parts = finish.breakdown
    assert 0 < parts.decode < parts.total <= took
    assert parts.queue + parts.prefill + parts.decode == pytest.approx(parts.total, rel=1e-3)


def test_tokens_models_and_texts_are_those_of_the_http_server(served: GrpcServer, server: Server) -> None:
    def http(path: str, **body: Any) -> Any:
        return httpx.post(server.url + path, json=body, timeout=PATIENCE).json()

    for text in (PROMPTS[0], "naïve 😀\n\n<|endoftext|>", ""):
        ids = list(served.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)
        assert ids == http("/tokenize", prompt=text)["tokens"]
        back = served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text
        assert back == http("/detokenize", tokens=ids)["prompt"]
        assert back.endswith(text)
    message = {"role": "user", "content": "hi"}
    told = served.stub.Tokenize(pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(**message)])))
    want = http("/tokenize", messages=[message])
    assert (list(told.token_ids), told.max_model_len) == (want["tokens"], want["max_model_len"])
    models = served.stub.ListModels(pb.ListModelsRequest()).models
    assert [(m.id, m.max_model_len) for m in models] == [
        (m["id"], m["max_model_len"]) for m in httpx.get(f"{server.url}/v1/models").json()["data"]
    ]


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "temperature": -1.0},
        {"prompt": "x", "n": 1000},
        {"prompt": "x", "max_tokens": 10**6},
        {"prompt": "x", "logprobs": -2},
        {"prompt": "x", "top_p": 0.0},
        {"prompt": "x", "stop": ["a" * 5000]},
        {"prompt": "x", "stop_token_ids": [10**6]},
        {"prompt": "x", "logit_bias": {"5": 1000.0}},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "x", "model": "gpt-7"},
        {"prompt": [10**6]},
        {"prompt": "x" * 10**6},
        {"messages": [], "temperature": 0.0},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        {"messages": [{"role": "", "content": "x"}]},
    ],
    ids=lambda body: "-".join(body)[:30],
)
def test_mistakes_are_told_as_the_http_server_tells_them(
    served: GrpcServer, server: Server, body: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = httpx.post(server.url + path, json={"model": MODEL} | body, timeout=PATIENCE)
    want = answer.json()["error"]
    assert answer.status_code in (400, 404)

    fields = {"model": MODEL} | body
    request = pb.GenerateRequest(model=fields.pop("model"))
    match fields.pop("prompt", None), fields.pop("messages", None):
        case (str(text), _):
            request.text = text
        case (list(ids), _):
            request.token_ids.ids.extend(ids)
        case (_, messages):
            json_format.ParseDict({"messages": messages}, request.chat)
            request.chat.SetInParent()
    if structure := fields.pop("structured_outputs", None):
        json_format.ParseDict(structure, request.structured_outputs)
    json_format.ParseDict(fields, request.sampling)

    error = fails(lambda: list(served.stub.Generate(request, timeout=PATIENCE)))
    assert error.code() == (Code.NOT_FOUND if answer.status_code == 404 else Code.INVALID_ARGUMENT)
    told = trailing(error)
    assert (told["type"], told.get("param"), told.get("code")) == (want["type"], want["param"], want["code"])
    assert error.details() == want["message"][:500]


def test_what_only_grpc_can_get_wrong(served: GrpcServer) -> None:
    def param(**fields: Any) -> str:
        error = fails(lambda: generate(served, **fields))
        assert error.code() == Code.INVALID_ARGUMENT
        return trailing(error)["param"]

    assert param() == "prompt"
    assert param(text="x", request_id="two words") == "request_id"
    assert param(text="x", timeout=-1.0) == "timeout"
    assert param(text="x", timeout=float("nan")) == "timeout"
    assert param(text="x", structured_outputs=pb.StructuredOutputs()) == "structured_outputs"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    chat.chat_template_kwargs.fields["x"].number_value = float("inf")
    assert param(chat=chat) == "chat_template_kwargs"
    wrong = pb.DetokenizeRequest(token_ids=[10**6])
    assert trailing(fails(lambda: served.stub.Detokenize(wrong)))["param"] == "token_ids"
    assert fails(lambda: served.stub.Abort(pb.AbortRequest())).code() == Code.INVALID_ARGUMENT


def test_a_message_that_is_none_is_the_clients_mistake(served: GrpcServer) -> None:
    for method in ("Generate", "Tokenize"):
        call = served.channel.unary_stream(f"/ridgeline.v1.Inference/{method}")
        error = fails(lambda call=call: list(call(b"\xff\xff\xff", timeout=PATIENCE)))
        assert error.code() == Code.INVALID_ARGUMENT
        assert ".proto" in error.details()


def test_methods_that_are_not_there_hurt_nobody(served: GrpcServer) -> None:
    for name in (b"/\xff\xfe", b"", b"/", b"/ridgeline.v1.Inference/Train", "/ä/ö".encode()):
        assert (
            fails(lambda name=name: served.channel.unary_unary(name)(b"", timeout=PATIENCE)).code()
            == Code.UNIMPLEMENTED
        )
    assert finishes(generate(served, text="x", sampling=greedy(2)))


def test_messages_are_bounded(engine_socket: Path) -> None:
    with serve_grpc(engine_socket, max_body_bytes=100_000) as served:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            request = pb.TokenizeRequest(text="a" * 200_000)
            error = fails(lambda r=request, c=compression: served.stub.Tokenize(r, compression=c, timeout=PATIENCE))
            assert error.code() == Code.RESOURCE_EXHAUSTED
        assert len(served.stub.Tokenize(pb.TokenizeRequest(text="a b" * 20_000)).token_ids) > 10_000


# ---- who may ------------------------------------------------------------------------------------------------------


def all_methods(served: GrpcServer, key: str) -> Iterator[str]:
    database = ProtoReflectionDescriptorDatabase(
        grpc.intercept_channel(served.channel, _WithMetadata(("authorization", f"Bearer {key}")))
    )
    pool = descriptor_pool.DescriptorPool(database)
    services = database.get_services()
    assert set(services) == {*SERVICES, "grpc.reflection.v1alpha.ServerReflection"}
    for name in services:
        for method in pool.FindServiceByName(name).methods:
            yield f"/{name}/{method.name}"


class _WithMetadata(grpc.StreamStreamClientInterceptor):
    def __init__(self, *entries: tuple[str, str]) -> None:
        self._entries = entries

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._entries), requests)


def test_every_method_but_health_asks_for_a_key(engine_socket: Path) -> None:
    with serve_grpc(engine_socket, api_key=("one", "two"), admin_key=("root",)) as served:
        methods = [*all_methods(served, "two"), "/unknown/Method"]
        assert len(methods) == 19

        def code(method: str, *metadata: tuple[str, str], timeout: float = 0.5) -> grpc.StatusCode:
            # Closing tells one that streams from one that refuses: an open stream ends as the deadline says.
            call = served.channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=timeout)
            try:
                for _ in call:
                    call.cancel()
            except grpc.RpcError:
                pass
            found: grpc.StatusCode = call.code()
            return found

        wrong = [(), (("authorization", "Bearer three"),), (("authorization", "one"),), (("x-api-key", "on"),)]
        right = [(("authorization", "bearer one"),), (("x-api-key", "two"),), (("x-api-key", "root"),)]
        for method in methods:
            is_open = method in guard.OPEN
            for metadata in wrong if not is_open else ():
                assert code(method, *metadata, timeout=PATIENCE) == Code.UNAUTHENTICATED, method
            assert code(method, *(() if is_open else right[0])) != Code.UNAUTHENTICATED, method
        tokenize = served.channel.unary_unary("/ridgeline.v1.Inference/ListModels")
        for metadata in right:
            assert b"embedded" in tokenize(b"", metadata=metadata)
        assert sum(method in guard.OPEN for method in methods) == 5

        running = served.stub.Generate(
            pb.GenerateRequest(text="x", sampling=LONG, request_id="mine"), metadata=right[0]
        )
        next(running)
        stranger = served.stub.Abort(pb.AbortRequest(request_id="mine"), metadata=right[1])
        own = served.stub.Abort(pb.AbortRequest(request_id="mine"), metadata=right[0])
        assert (stranger.found, own.found) == (False, True)
        assert finishes(list(running))[0].reason == "abort"
        assert served.wait_idle()


def test_only_a_trusted_key_names_a_tenant_and_asks_for_any_priority(
    engine_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = owner.take

    def noted(*given: Any, **named: Any) -> None:
        take(*given, **named)
        taken.append(owner.current())

    monkeypatch.setattr(owner, "take", noted)
    urgent = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=2), priority=-1)
    keys = {"api_key": ("plain", "trusted"), "trusted_key": ("trusted",), "priority_floor": 0}
    with serve_grpc(engine_socket, **keys) as served:

        def code(key: str, tenant: str) -> grpc.StatusCode:
            metadata = (("x-api-key", key), ("x-ridgeline-tenant", tenant))
            try:
                list(served.stub.Generate(urgent, metadata=metadata))
            except grpc.RpcError as error:
                found: grpc.StatusCode = error.code()
                return found
            return Code.OK

        assert code("plain", "acme") == Code.INVALID_ARGUMENT
        assert code("trusted", "acme") == Code.OK
        assert code("trusted", "a/b") == Code.INVALID_ARGUMENT
    assert taken == [sha256(b"plain").hexdigest()[:16], "acme"]


def test_a_certificate_makes_it_private(engine_socket: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, file = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", file, "-days", "2"]
    subprocess.run([*made, "-subj", "/CN=localhost"], check=True, capture_output=True)
    with serve_grpc(engine_socket, ssl_keyfile=key, ssl_certfile=file) as served:
        trusted = grpc.ssl_channel_credentials(Path(file).read_bytes())
        name = [("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(served.address, trusted, name) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert [model.id for model in stub.ListModels(pb.ListModelsRequest()).models] == [MODEL, "alias"]
        plain = fails(lambda: served.stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE))
        assert plain.code() == Code.UNAVAILABLE


# ---- the life of a request ----------------------------------------------------------------------------------------


def test_a_request_has_an_id_and_abort_finds_it(served: GrpcServer) -> None:
    call = served.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG), metadata=[("x-request-id", "by-metadata")])
    assert next(call).request_id == "by-metadata"
    assert not served.stub.Abort(pb.AbortRequest(request_id="by")).found
    assert served.stub.Abort(pb.AbortRequest(request_id="by-metadata")).found
    [finish] = finishes(list(call))
    assert finish.reason == "abort"
    assert 0 < finish.usage.completion_tokens < 1500
    assert dict(call.trailing_metadata())["x-request-id"] == "by-metadata"
    assert not served.stub.Abort(pb.AbortRequest(request_id="by-metadata")).found
    assert generate(served, text="x", request_id="by-field")[0].request_id == "by-field"
    assert generate(served, text="x")[0].request_id.startswith("req-")
    assert served.wait_idle()


def test_a_cancelled_call_ends_in_the_engine_within_a_step(served: GrpcServer) -> None:
    async def steps_after_cancel() -> int:
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x", sampling=LONG))
            for _ in range(5):
                await call.read()
            call.cancel()
            while served.api.client.num_open:
                await asyncio.sleep(0)
            before = await served.api.client.ask()
            await asyncio.sleep(0.1)
            after = await served.api.client.ask()
            assert before is not None
            assert after is not None
            assert after.running == 0
            return after.steps - before.steps

    assert served.run(steps_after_cancel()) <= 1
    assert served.wait_idle()


def test_deadlines_end_requests(served: GrpcServer) -> None:
    request = pb.GenerateRequest(text="x", sampling=LONG)
    call = served.stub.Generate(request, timeout=0.3)
    assert fails(lambda: list(call)).code() == Code.DEADLINE_EXCEEDED
    assert served.wait_idle()
    request.timeout = 0.2
    error = fails(lambda: list(served.stub.Generate(request, timeout=PATIENCE)))
    assert (error.code(), trailing(error)["code"]) == (Code.DEADLINE_EXCEEDED, "timeout")
    assert "0.2 s" in error.details()
    assert served.wait_idle()


def test_a_full_queue_says_when_to_come_again_and_clients_obey(engine_socket: Path) -> None:
    with serve_grpc(engine_socket, max_queue_requests=1) as served:
        running = served.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
        next(running)
        request = pb.GenerateRequest(text="x", sampling=greedy(2))
        error = fails(lambda: list(served.stub.Generate(request)))
        told = trailing(error)
        assert error.code() == Code.RESOURCE_EXHAUSTED
        assert (told["type"], told["code"]) == ("rate_limit_error", "queue_full")
        assert (told["retry-after"], told["grpc-retry-pushback-ms"]) == ("1", "1000")

        policy = '{"maxAttempts": 3, "initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1, '
        service = '{"name": [{"service": "ridgeline.v1.Inference"}], "retryPolicy": '
        config = f'{{"methodConfig": [{service}{policy}"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}}}]}}'
        threading.Timer(0.3, running.cancel).start()
        with grpc.insecure_channel(served.address, options=[("grpc.service_config", config)]) as channel:
            responses = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=PATIENCE))
        assert finishes(responses)
        assert served.wait_idle()


def test_a_reader_that_stops_reading_is_cut(engine_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STALLED", 0.5)
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    sampling = pb.Sampling(n=8, max_tokens=1500, ignore_eos=True, logprobs=20)  # much to read
    with serve_grpc(engine_socket, stream_buffer=8) as served, grpc.insecure_channel(served.address, small) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x", sampling=sampling))
        next(call)
        assert served.wait_idle(), "nobody reads, and the engine goes on"
        error = fails(lambda: list(call))
        assert (error.code(), trailing(error)["code"]) == (Code.ABORTED, "slow_reader")


def test_a_storm_of_clients_that_leave_breaks_nothing(served: GrpcServer, caplog: pytest.LogCaptureFixture) -> None:
    async def leave(stub: inference_pb2_grpc.InferenceStub, after: int) -> None:
        call = stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
        for _ in range(after % 7):
            await call.read()
        call.cancel()

    async def storm() -> None:
        for _ in range(4):
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await asyncio.gather(*(leave(stub, number) for number in range(50)))

    with caplog.at_level(logging.WARNING):
        served.run(storm())
        assert served.wait_idle()
    assert [record.message for record in caplog.records if "poller" not in record.name.lower()] == []
    assert finishes(generate(served, text="x", sampling=greedy(2)))


def test_a_call_that_brings_nothing_ends(engine_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STALLED", 0.3)
    with serve_grpc(engine_socket) as served:
        silent, never = threading.Event(), iter(lambda: silent.wait(20), None)
        call = served.channel.stream_stream("/grpc.health.v1.Health/Check")(never)
        assert fails(lambda: next(call)).code() == Code.DEADLINE_EXCEEDED
        silent.set()


def test_a_server_without_room_says_so(served: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(served.api.service, "run", full)
    error = fails(lambda: generate(served, text="x", sampling=greedy(2)))
    assert (error.code(), trailing(error)["code"]) == (Code.RESOURCE_EXHAUSTED, "storage_full")


# ---- the life of the server ---------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_refuses_the_rest(engine_socket: Path) -> None:
    with serve_grpc(engine_socket) as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        running = served.stub.Generate(
            pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=60, ignore_eos=True))
        )
        next(running)
        served.api.service.admission.draining = True
        error = fails(lambda: generate(served, text="x"))
        assert error.code() == Code.UNAVAILABLE
        assert trailing(error)["retry-after"] == "5"
        assert [each.status for each in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING], "it should end"
        assert served.kserve.ServerLive(kserve.ServerLiveRequest()).live
        assert not served.kserve.ServerReady(kserve.ServerReadyRequest()).ready
        assert not served.kserve.ModelReady(kserve.ModelReadyRequest(name=MODEL)).ready
        began = time.monotonic()
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(60), served.loop)
        [finish] = finishes(list(running))
        assert (finish.reason, finish.usage.completion_tokens) == ("length", 60)
        stopping.result(PATIENCE)
        assert time.monotonic() - began < 50, "something held the end up"


def test_health_follows_the_engines_life(tmp_path: Path) -> None:
    status = health_pb2.HealthCheckResponse
    engine = start_engine(tmp_path / "socket")
    try:
        with serve_grpc(tmp_path / "socket") as served:
            health = health_pb2_grpc.HealthStub(served.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=PATIENCE)
            assert next(watch).status == status.SERVING
            for name in ("", *SERVICES[:2]):
                assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == status.SERVING
            listed = health.List(health_pb2.HealthListRequest()).statuses
            assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
                ("", *SERVICES[:2]), status.SERVING
            )
            unknown = health_pb2.HealthCheckRequest(service="nobody")
            assert fails(lambda: health.Check(unknown)).code() == Code.NOT_FOUND
            assert next(health.Watch(unknown)).status == status.SERVICE_UNKNOWN
            running = served.stub.Generate(pb.GenerateRequest(text="x", sampling=LONG))
            next(running)
            stop_engine(engine)
            error = fails(lambda: list(running))
            assert (error.code(), trailing(error)["code"]) == (Code.UNAVAILABLE, "engine_unavailable")
            assert next(watch).status == status.NOT_SERVING
            assert fails(lambda: generate(served, text="x")).code() == Code.UNAVAILABLE
            assert served.kserve.ServerLive(kserve.ServerLiveRequest()).live
            engine = start_engine(tmp_path / "socket")
            assert next(watch).status == status.SERVING
            assert finishes(generate(served, text="x", sampling=greedy(2)))
    finally:
        stop_engine(engine)


# ---- the Open Inference Protocol ----------------------------------------------------------------------------------


def infer_request(prompt: str, *, raw: bool = False, name: str = "", **parameters: Any) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name=MODEL, id=name)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    data = prompt.encode()
    if raw:
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    else:
        tensor.contents.bytes_contents.append(data)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for key, value in ({"max_tokens": 24, "temperature": 0.0} | parameters).items():
        setattr(request.parameters[key], kinds[type(value)], value)
    return request


def inferred(response: kserve.ModelInferResponse) -> str:
    [output] = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [1])
    if response.raw_output_contents:
        [data] = response.raw_output_contents
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        return data[4:].decode()
    [element] = output.contents.bytes_contents
    return element.decode()


def test_infer_is_the_offline_answer(served: GrpcServer, offline: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        want = offline[prompt]
        for raw in (False, True):
            response = served.kserve.ModelInfer(infer_request(prompt, raw=raw, name="seven"))
            assert inferred(response) == want.outputs[0].text
            assert bool(response.raw_output_contents) == raw
            assert (response.id, response.model_name) == ("seven", MODEL)
            told = response.parameters
            assert told["finish_reason"].string_param == want.outputs[0].finish_reason
            assert told["prompt_tokens"].int64_param == len(want.prompt_token_ids)
            assert told["completion_tokens"].int64_param == len(want.outputs[0].token_ids)
    choice = infer_request("=", structured_outputs='{"choice": ["left", "right"]}')
    assert inferred(served.kserve.ModelInfer(choice)) in ("left", "right")


def test_infer_streams_answer_side_by_side(served: GrpcServer, offline: dict[str, Any]) -> None:
    requests = [infer_request(prompt, name=str(number)) for number, prompt in enumerate(PROMPTS)]
    requests.append(infer_request(PROMPTS[0], name="whole", stream=False))
    requests.append(infer_request("x", name="bad", temperature=-1.0))
    texts: dict[str, list[str]] = {}
    final, errors = [], {}
    for response in served.kserve.ModelStreamInfer(iter(requests), timeout=PATIENCE):
        told = response.infer_response
        if response.error_message:
            errors[told.id] = response.error_message
            continue
        texts.setdefault(told.id, []).append(inferred(told))
        if told.parameters["triton_final_response"].bool_param:
            final.append(told.id)
    for number, prompt in enumerate(PROMPTS):
        assert "".join(texts[str(number)]) == offline[prompt].outputs[0].text
        assert len(texts[str(number)]) > 3
    assert texts["whole"] == [offline[PROMPTS[0]].outputs[0].text]
    assert sorted(final) == ["0", "1", "2", "whole"]
    assert list(errors) == ["bad"]
    assert "temperature" in errors["bad"]
    assert served.wait_idle()


def test_an_infer_stream_that_is_left_ends_its_requests(served: GrpcServer) -> None:
    async def leave() -> None:
        async def requests() -> AsyncIterator[kserve.ModelInferRequest]:
            for number in range(5):
                yield infer_request("x", name=str(number), max_tokens=1500, ignore_eos=True)
            await asyncio.sleep(30)

        async with grpc.aio.insecure_channel(served.address) as channel:
            call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
            for _ in range(20):
                await call.read()
            call.cancel()

    served.run(leave())
    assert served.wait_idle()


def test_infer_describes_itself(served: GrpcServer) -> None:
    told = served.kserve.ServerMetadata(kserve.ServerMetadataRequest())
    assert (told.name, told.version) == ("ridgeline", __version__)
    model = served.kserve.ModelMetadata(kserve.ModelMetadataRequest(name=MODEL))
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("text_input", "BYTES", [1])]
    assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [("text_output", "BYTES", [1])]
    assert served.kserve.ModelReady(kserve.ModelReadyRequest(name=MODEL, version=model.versions[0])).ready
    assert not served.kserve.ModelReady(kserve.ModelReadyRequest(name="nobody")).ready
    assert not served.kserve.ModelReady(kserve.ModelReadyRequest(name=MODEL, version="2")).ready
    assert served.kserve.ServerReady(kserve.ServerReadyRequest()).ready
    nobody = kserve.ModelMetadataRequest(name="nobody")
    assert fails(lambda: served.kserve.ModelMetadata(nobody)).code() == Code.NOT_FOUND


def statistics(served: GrpcServer, name: str = MODEL) -> kserve.ModelStatistics:
    [told] = served.kserve.ModelStatistics(kserve.ModelStatisticsRequest(name=name)).model_stats
    return told


def grown(after: Any, before: Any) -> dict[str, tuple[int, int]]:
    """How much the counts and the nanoseconds of each duration grew."""
    names = [field.name for field in after.DESCRIPTOR.fields if field.message_type is not None]
    return {
        name: (
            getattr(after, name).count - getattr(before, name).count,
            getattr(after, name).ns - getattr(before, name).ns,
        )
        for name in names
    }


def test_statistics_add_up_to_what_clients_saw(served: GrpcServer) -> None:
    before, begun, day = statistics(served), time.monotonic(), time.time()
    for prompt in PROMPTS:
        served.kserve.ModelInfer(infer_request(prompt))
    took = time.monotonic() - begun
    told = statistics(served)
    assert (told.name, told.version) == (MODEL, "1")
    assert abs(told.last_inference / 1000 - day) < took + 1
    assert told.inference_count - before.inference_count == told.execution_count - before.execution_count == 3
    spent = grown(told.inference_stats, before.inference_stats)
    assert {name: count for name, (count, _) in spent.items()} == {
        **dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 3),
        **dict.fromkeys(("fail", "cache_hit", "cache_miss"), 0),
    }
    parts = [spent[name][1] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert sum(parts) == pytest.approx(spent["success"][1], abs=100)
    assert 0 < spent["success"][1] < took * 1e9
    assert spent["compute_infer"][1] > spent["success"][1] / 2, "24 tokens take longer than all around them"
    [batch] = told.batch_stats
    assert (batch.batch_size, batch.compute_infer) == (1, told.inference_stats.compute_infer)

    def fail() -> None:
        served.kserve.ModelInfer(infer_request("x", temperature=-1.0))

    assert fails(fail).code() == Code.INVALID_ARGUMENT
    failed = statistics(served)
    assert grown(failed.inference_stats, told.inference_stats)["fail"][0] == 1
    assert failed.inference_count == told.inference_count
    names = {each.name for each in served.kserve.ModelStatistics(kserve.ModelStatisticsRequest()).model_stats}
    assert names == {MODEL, "alias"}
    nobody = kserve.ModelStatisticsRequest(name="nobody")
    assert fails(lambda: served.kserve.ModelStatistics(nobody)).code() == Code.NOT_FOUND


@pytest.mark.parametrize("without_output", [False, True, None])
def test_a_stream_ends_with_an_empty_response_where_that_is_asked_for(
    served: GrpcServer, offline: dict[str, Any], without_output: bool | None
) -> None:
    before = statistics(served)
    more = {} if without_output is None else {"triton_enable_empty_final_response": without_output}
    asked = infer_request(PROMPTS[0], **more)
    *pieces, last = [each.infer_response for each in served.kserve.ModelStreamInfer(iter([asked]), timeout=PATIENCE)]
    assert "".join(map(inferred, pieces)) == offline[PROMPTS[0]].outputs[0].text
    assert [each.parameters["triton_final_response"].bool_param for each in pieces] == [False] * len(pieces)
    assert last.parameters["triton_final_response"].bool_param
    assert last.parameters["finish_reason"].string_param == "length"
    if without_output:
        assert not last.outputs
        assert not last.raw_output_contents
    else:
        assert inferred(last) == ""
    told = statistics(served)
    for place, response in enumerate([*pieces, last]):
        spent = grown(told.response_stats[str(place)], before.response_stats[str(place)])
        kind = "empty_response" if response is last else "success"
        assert {name for name, (count, _) in spent.items() if count} >= {kind}
    assert (
        fails(lambda: served.kserve.ModelInfer(infer_request("x", triton_enable_empty_final_response=1))).code()
        == Code.INVALID_ARGUMENT
    )


def test_an_answer_in_one_piece_needs_no_empty_response(served: GrpcServer, offline: dict[str, Any]) -> None:
    for asked in (
        infer_request(PROMPTS[0], stream=False, triton_enable_empty_final_response=True),
        infer_request(PROMPTS[0], triton_enable_empty_final_response=True, best_of=2, temperature=1.0),
    ):
        [told] = [each.infer_response for each in served.kserve.ModelStreamInfer(iter([asked]), timeout=PATIENCE)]
        assert told.parameters["triton_final_response"].bool_param
        assert inferred(told)


def test_the_configuration_is_tritons(served: GrpcServer) -> None:
    config = served.kserve.ModelConfig(kserve.ModelConfigRequest(name=MODEL)).config
    assert (config.name, config.backend, config.platform, config.max_batch_size) == (MODEL, "ridgeline", "", 0)
    assert config.model_transaction_policy.decoupled
    assert config.version_policy.latest.num_versions == 1
    for [tensor], name in ((config.input, "text_input"), (config.output, "text_output")):
        assert (tensor.name, tensor.data_type, list(tensor.dims)) == (name, kserve.TYPE_STRING, [1])
    nobody = kserve.ModelConfigRequest(name=MODEL, version="2")
    assert fails(lambda: served.kserve.ModelConfig(nobody)).code() == Code.NOT_FOUND


TRITON = """
import queue, sys
import numpy as np, tritonclient.grpc as triton
address, model, prompt = sys.argv[1:]
client = triton.InferenceServerClient(address)
config = client.get_model_config(model, as_json=True)["config"]
assert config["model_transaction_policy"] == {"decoupled": True}, config
assert config["input"][0]["data_type"] == "TYPE_STRING", config
answers = queue.Queue()
client.start_stream(lambda result, error: answers.put((result, error)))
given = triton.InferInput("text_input", [1], "BYTES")
given.set_data_from_numpy(np.array([prompt.encode()], object))
text = []
for _ in range(2):
    client.async_stream_infer(
        model, [given], parameters={"max_tokens": 24, "temperature": 0}, enable_empty_final_response=True
    )
    while True:
        result, error = answers.get(timeout=120)
        assert error is None, error
        if result.get_response().parameters["triton_final_response"].bool_param:
            assert result.as_numpy("text_output") is None
            break
        text.append(result.as_numpy("text_output")[0].decode())
client.stop_stream()
stats = client.get_inference_statistics(model).model_stats[0]
assert stats.inference_count >= 2 and stats.inference_stats.success.ns > 0, stats
assert stats.response_stats["0"].success.count >= 2, stats
assert len(client.get_inference_statistics().model_stats) == 2
print("".join(text))
"""


@needing("tritonclient")
def test_tritons_client_reads_streams_configurations_and_statistics(
    served: GrpcServer, offline: dict[str, Any]
) -> None:
    """In a process of its own: both of us describe messages of these names."""
    command = [sys.executable, "-c", TRITON, served.address, MODEL, PROMPTS[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * offline[PROMPTS[0]].outputs[0].text + "\n"


def _changed(change: Callable[[kserve.ModelInferRequest], Any], **options: Any) -> kserve.ModelInferRequest:
    request = infer_request("x", **options)
    change(request)
    return request


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (_changed(lambda r: r.ClearField("inputs")), "inputs"),
        (_changed(lambda r: setattr(r.inputs[0], "name", "text")), "inputs"),
        (_changed(lambda r: setattr(r.inputs[0], "datatype", "FP32")), "text_input"),
        (_changed(lambda r: r.inputs[0].shape.append(2)), "text_input"),
        (_changed(lambda r: r.inputs[0].contents.bytes_contents.append(b"y")), "text_input"),
        (_changed(lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff")), "text_input"),
        (_changed(lambda r: r.raw_input_contents.append(b"\1\0\0\0x")), "text_input"),
        (_changed(lambda r: r.raw_input_contents.__setitem__(0, b"\x09\0\0\0x"), raw=True), "text_input"),
        (_changed(lambda r: r.outputs.add(name="logits")), "outputs"),
        (_changed(lambda r: setattr(r, "model_name", "")), "model"),
        (_changed(lambda r: r.parameters["seed"].SetInParent()), "seed"),
        (infer_request("x", n=2), "n"),
        (infer_request("x", stream=True), "stream"),
        (infer_request("x", logit_bias="{"), "logit_bias"),
        (infer_request("x", structured_outputs="[" * 5000), "structured_outputs"),
        (infer_request("x", max_tokens="many"), "max_tokens"),
        (infer_request("x", max_tokens=0), "max_tokens"),
    ],
)
def test_infer_says_what_is_wrong(served: GrpcServer, request_: kserve.ModelInferRequest, param: str) -> None:
    error = fails(lambda: served.kserve.ModelInfer(request_))
    assert (error.code(), trailing(error)["param"]) == (Code.INVALID_ARGUMENT, param)


# ---- the interface ------------------------------------------------------------------------------------------------


def test_a_client_needs_no_files_of_ours(served: GrpcServer, offline: dict[str, Any]) -> None:
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(served.channel))
    method = pool.FindServiceByName(SERVICES[0]).FindMethodByName("Generate")
    request = message_factory.GetMessageClass(method.input_type)()
    json_format.ParseDict({"text": PROMPTS[0], "sampling": {"temperature": 0, "maxTokens": 24}}, request)
    response = message_factory.GetMessageClass(method.output_type)
    call = served.channel.unary_stream(f"/{SERVICES[0]}/Generate", type(request).SerializeToString, response.FromString)
    assert text_of(list(call(request, timeout=PATIENCE))) == offline[PROMPTS[0]].outputs[0].text


def test_the_generated_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    folder = root / "ridgeline" / "serving" / "grpc" / "proto"
    for file, module in (("kserve.proto", kserve), ("ridgeline/v1/inference.proto", pb)):
        path = (folder / file).relative_to(root)
        made, include = tmp_path / "made", Path(sys.modules["grpc_tools"].__path__[0]) / "_proto"
        assert protoc.main(["protoc", f"-I{root}", f"-I{include}", f"--descriptor_set_out={made}", str(path)]) == 0
        [want] = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
        for message in want.message_type:
            _without_json_names(message)
        found = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        assert found == want, f"run `make proto`: {path} has changed"
        assert protoc.main(["protoc", f"-I{root}", f"-I{include}", f"--python_out={tmp_path}", str(path)]) == 0
        generated: dict[str, Any] = {"__name__": "clients_pb2"}
        exec((tmp_path / path).with_name(f"{path.stem}_pb2.py").read_text(), generated)  # beside ours, in one process
        assert generated["DESCRIPTOR"].serialized_pb == module.DESCRIPTOR.serialized_pb


def _without_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """protoc writes them into descriptor sets, and leaves them out of code."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _without_json_names(nested)
