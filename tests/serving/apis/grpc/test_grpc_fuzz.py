"""Whatever comes over gRPC, the client is told what was wrong with it, and the server goes on.

Run it for longer with RIDGELINE_FUZZ=10000 (examples of each kind).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline import LLM, SamplingParams
from ridgeline.serving.grpc.proto import kserve_pb2 as kserve
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2 as pb
from tests.serving.apis.grpc.grpc_server import GrpcServer, serve_grpc
from tests.serving.conftest import DTYPE, MODEL

LONG_RUN = int(os.environ.get("RIDGELINE_FUZZ", "0"))
DEADLINE = 2.0  # seconds: valid requests may want more than that
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)  # the server's own mistakes
KEY = (("authorization", "Bearer key"),)
METHODS: dict[str, type[Message]] = {
    "/ridgeline.v1.Inference/Generate": pb.GenerateRequest,
    "/ridgeline.v1.Inference/Tokenize": pb.TokenizeRequest,
    "/ridgeline.v1.Inference/Detokenize": pb.DetokenizeRequest,
    "/ridgeline.v1.Inference/ListModels": pb.ListModelsRequest,
    "/ridgeline.v1.Inference/Abort": pb.AbortRequest,
    "/inference.GRPCInferenceService/ServerLive": kserve.ServerLiveRequest,
    "/inference.GRPCInferenceService/ServerReady": kserve.ServerReadyRequest,
    "/inference.GRPCInferenceService/ModelReady": kserve.ModelReadyRequest,
    "/inference.GRPCInferenceService/ServerMetadata": kserve.ServerMetadataRequest,
    "/inference.GRPCInferenceService/ModelMetadata": kserve.ModelMetadataRequest,
    "/inference.GRPCInferenceService/ModelInfer": kserve.ModelInferRequest,
    "/inference.GRPCInferenceService/ModelStreamInfer": kserve.ModelInferRequest,
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest,
}
if hasattr(health_pb2, "HealthListRequest"):  # packages for protobuf 6, which tritonclient asks for, do not have it
    METHODS["/grpc.health.v1.Health/List"] = health_pb2.HealthListRequest
STREAMED = (kserve.ModelInferRequest, reflection_pb2.ServerReflectionRequest)
GENERATING = ("Generate", "ModelInfer", "ModelStreamInfer")


def fuzzed(examples: int) -> Any:
    """The same examples at every short run, others at every long one."""
    checks = list(HealthCheck)
    return settings(max_examples=LONG_RUN or examples, derandomize=not LONG_RUN, suppress_health_check=checks)


@pytest.fixture(scope="module")
def served(engine_socket: Path) -> Iterator[GrpcServer]:
    with serve_grpc(engine_socket, api_key=("key",), grammar_timeout=1.0, max_body_bytes=1 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def alive(served: GrpcServer) -> Iterator[GrpcServer]:
    """The server, which after the test still answers as the offline API does, and has nothing left over."""
    yield served
    assert served.wait_idle()
    want = LLM(dtype=DTYPE).generate(["def f("], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    request = pb.GenerateRequest(text="def f(", sampling=pb.Sampling(temperature=0, max_tokens=8))
    assert "".join(each.piece.text for each in served.stub.Generate(request, metadata=KEY, timeout=120)) == want


def call(served: GrpcServer, method: str | bytes, data: Iterable[bytes], **more: Any) -> grpc.StatusCode:
    """The status that ends it. Methods that take one message are called as ones that take many: so may a client."""
    options = {"metadata": KEY, "timeout": DEADLINE} | more
    answer = served.channel.stream_stream(method)(iter(data), **options)
    try:
        for response in answer:
            assert b"the server failed" not in response
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = answer.code()
    assert code not in OURS, f"{method!r}: {code} {answer.details()}"
    return code


# ---- messages -----------------------------------------------------------------------------------------------------

WILD_TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            MODEL,
            "alias",
            "user",
            "text_input",
            "text_output",
            "BYTES",
            "json",
            "",
            "{}",
            "[",
            "(" * 200,
            "[a-z]{1,9999}",
        ]
    ),
    st.sampled_from(
        ["start: start start", '{"type": "object"}', '{"$ref": "#"}', "\x00", "a" * 5000, "😀" * 50, "%s{{"]
    ),
)
WILD_INT = st.one_of(st.integers(-2, 40), st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**32 - 1, 12_345]))
WILD_FLOAT = st.one_of(
    st.floats(), st.floats(0, 2), st.sampled_from([0.0, 1.0, -0.0, float("nan"), float("inf"), 1e308, 5e-324])
)
UINTS = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
INT_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
PARAMETERS = [
    *("max_tokens", "temperature", "n", "stop", "seed", "echo", "logprobs", "prompt_logprobs", "stream", "best_of"),
    *("logit_bias", "stop_token_ids", "structured_outputs", "response_format", "suffix", "functions", "prompt", "user"),
]


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return WILD_TEXT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.one_of(st.binary(max_size=20), st.sampled_from([b"x = 1", b"\3\0\0\0abc", b"\xff\xff\xff\xff"]))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type in INT_RANGES:
        low, high = INT_RANGES[field.type]
        return WILD_INT.map(lambda value: min(max(value, low), high))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.integers(0, 3)
    return WILD_FLOAT


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any message of this kind; deeper ones have fewer fields."""
    message: Message = descriptor._concrete_class()
    if depth > 5:
        return message
    for field in descriptor.fields:
        if draw(st.integers(0, 2 + depth)):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(draw, getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values(field, depth), max_size=3)))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(values(field, depth)))
        else:
            setattr(message, field.name, draw(values(field, depth)))
    return message


def _fill_map(draw: st.DrawFn, target: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    keys = st.sampled_from(PARAMETERS) if key.type == FieldDescriptor.TYPE_STRING else values(key, depth)
    for name in draw(st.lists(keys, max_size=4)):
        if value.type == FieldDescriptor.TYPE_MESSAGE:
            target[name].CopyFrom(draw(values(value, depth)))
        else:
            target[name] = draw(values(value, depth))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Message]:
    """Mostly such that more than the first field is looked at."""
    method = draw(st.sampled_from([*METHODS, *(name for name in METHODS if name.endswith(GENERATING))]))
    message = draw(messages(METHODS[method].DESCRIPTOR))
    tame = draw(st.integers(0, 5)) > 0
    if tame and "model" in message.DESCRIPTOR.fields_by_name:
        message.ClearField("model")
    match message:
        case pb.GenerateRequest() if tame:
            for name in ("request_id", *draw(st.sets(st.sampled_from(["timeout", "priority", "structured_outputs"])))):
                message.ClearField(name)
            if message.WhichOneof("prompt") is None:
                message.text = "x"
            _keep_few(draw, message.sampling)
            message.sampling.max_tokens = 3
        case kserve.ModelInferRequest() if tame:
            message.model_name, message.model_version = MODEL, ""
            for name in list(message.parameters)[draw(st.integers(0, 2)) :]:
                del message.parameters[name]
            message.parameters["max_tokens"].int64_param = 3
            for name in draw(st.sets(st.sampled_from(["inputs", "raw_input_contents", "outputs"]))):
                message.ClearField(name)
            if not message.inputs:
                tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
                tensor.contents.bytes_contents.append(draw(st.text(max_size=9)).encode())
    return method, message


def _keep_few(draw: st.DrawFn, message: Message) -> None:
    names = [field.name for field, _ in message.ListFields()]
    kept = draw(st.sets(st.sampled_from(names), max_size=2)) if names else ()
    for name in names:
        if name not in kept:
            message.ClearField(name)


@pytest.mark.dealt
@fuzzed(120)
@given(request=requests())
def test_wild_messages(alive: GrpcServer, request: tuple[str, Message]) -> None:
    method, message = request
    call(alive, method, [message.SerializeToString()])


@fuzzed(40)
@given(value=messages(struct_pb2.Value.DESCRIPTOR), depth=st.sampled_from([0, 1, 20, 40, 60, 100, 1000, 10_000]))
def test_wild_template_arguments(alive: GrpcServer, value: struct_pb2.Value, depth: int) -> None:
    data = value.SerializeToString()
    for tag in (b"\x0a", b"\x32") * depth:  # a list of one value, as a value
        data = tag + _varint(len(data)) + data
    for tag in (b"\x12", b"\x0a", b"\x12", b"\x1a"):  # of a field of a struct of a chat of a request
        name = b"\x0a\x01x" if tag == b"\x0a" else b""
        data = tag + _varint(len(name + data)) + name + data
    call(alive, "/ridgeline.v1.Inference/Tokenize", [data])


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


# ---- bytes --------------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    method, message = draw(requests())
    data = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[place : place + draw(st.integers(1, 8))]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=12))
            case "repeat":
                data += data[place:] * draw(st.integers(1, 20))
    return method, bytes(data[:100_000])


@fuzzed(120)
@given(request=damaged())
def test_damaged_messages(alive: GrpcServer, request: tuple[str, bytes]) -> None:
    call(alive, request[0], [request[1]])


@fuzzed(60)
@given(method=st.sampled_from(list(METHODS)), data=st.lists(st.binary(max_size=200), max_size=3))
def test_random_bytes_and_any_number_of_messages(alive: GrpcServer, method: str, data: list[bytes]) -> None:
    code = call(alive, method, data)
    if not data and METHODS[method] not in STREAMED:
        assert code == grpc.StatusCode.INVALID_ARGUMENT


@fuzzed(60)
@given(
    name=st.one_of(
        st.binary(max_size=40).map(lambda name: b"/" + name.replace(b"\0", b"")),
        st.tuples(st.sampled_from(list(METHODS)), st.text("abcXYZ/.%é\n ", max_size=5)).map(
            lambda parts: "".join(parts).encode()
        ),
    ),
    keyed=st.booleans(),
)
def test_random_method_names(alive: GrpcServer, name: bytes, keyed: bool) -> None:
    if name.decode(errors="replace") in METHODS:
        return
    code = call(alive, name, [b""], metadata=KEY if keyed else ())
    assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


@fuzzed(40)
@given(
    metadata=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["x-request-id", "authorization", "x-api-key"]), st.text(max_size=30).map(ascii)),
            st.tuples(st.sampled_from(["authorization-bin", "x-request-id-bin", "any-bin"]), st.binary(max_size=30)),
        ),
        max_size=4,
    )
)
def test_random_metadata(alive: GrpcServer, metadata: list[tuple[str, str | bytes]]) -> None:
    data = pb.TokenizeRequest(text="x").SerializeToString()
    call(alive, "/ridgeline.v1.Inference/Tokenize", [data], metadata=[*metadata, *KEY])
    code = call(alive, "/ridgeline.v1.Inference/Tokenize", [data], metadata=metadata)
    assert code == grpc.StatusCode.UNAUTHENTICATED


def test_messages_above_the_bound(alive: GrpcServer) -> None:
    for method in list(METHODS)[::4]:
        for size in (1 << 20, 1 << 21):
            code = call(alive, method, [bytes(size)], timeout=120)
            assert (code == grpc.StatusCode.RESOURCE_EXHAUSTED) == (size > 1 << 20)


# ---- frames -------------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK has it, neither indexed nor Huffman-coded."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def opening(method: bytes) -> bytes:
    entries = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"x")]
    entries += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), (b"authorization", b"Bearer key")]
    return frame(1, 4, 1, b"".join(literal(name, value) for name, value in entries))


FRAMES = st.one_of(
    st.builds(
        frame, st.integers(0, 10), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 2**31]), st.binary(max_size=64)
    ),
    st.builds(  # a message whose announced length is not its own
        lambda length, data, flag, end: frame(0, end, 1, bytes([flag]) + struct.pack(">I", length) + data),
        st.sampled_from([0, 1, 5, 2**20, 2**31, 2**32 - 1]),
        st.binary(max_size=64),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    st.binary(max_size=64),
)


@fuzzed(60)
@given(
    method=st.sampled_from([*(name.encode() for name in METHODS), b"/\xff\xfe", b""]),
    frames=st.lists(FRAMES, min_size=1, max_size=6),
    cut=st.integers(0, 30),
)
def test_broken_frames(alive: GrpcServer, method: bytes, frames: list[bytes], cut: int) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(alive.address.removeprefix("unix:"))
        connection.settimeout(0.02)
        data = PREFACE + SETTINGS + opening(method) + b"".join(frames)
        try:
            connection.sendall(data[: len(data) - cut])
            while connection.recv(4096):
                pass
        except OSError:
            pass
    code = call(alive, "/grpc.health.v1.Health/Check", [b""])
    assert code == grpc.StatusCode.OK
