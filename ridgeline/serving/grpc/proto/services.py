"""Messages, and the two ends of a gRPC service, made of their descriptors, which protoc's plugins would write out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import struct_pb2  # noqa: F401  # a .proto file here imports it
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default
from google.protobuf.internal import builder
from google.protobuf.message_factory import GetMessageClass


def load(module: str, names: dict[str, Any]) -> FileDescriptor:
    """Give a module its messages and enums, and return the descriptor of their .proto file.

    module: the path of X_pb2.py, beside which `make proto` wrote X.binpb. names: the module's names.
    """
    [file] = FileDescriptorSet.FromString(Path(module.replace("_pb2.py", ".binpb")).read_bytes()).file
    for message in file.message_type:
        _drop_json_names(message)
    found = Default().AddSerializedFile(file.SerializeToString())
    builder.BuildMessageAndEnumDescriptors(found, names)
    builder.BuildTopDescriptorsAndMessages(found, names["__name__"], names)
    return found


def _drop_json_names(message: DescriptorProto) -> None:
    """protoc writes them into descriptor sets and leaves them out of code. A process that also imports code which a
    client generated has one registry for both, which refuses a file that differs."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _drop_json_names(nested)


def _kind(method: MethodDescriptor) -> str:
    """Return gRPC's name for the kind of a call, such as "unary_stream"."""
    ends = (method.client_streaming, method.server_streaming)
    return "_".join("stream" if streams else "unary" for streams in ends)


def _calls(service: ServiceDescriptor, channel: Any) -> Iterator[tuple[str, Any]]:
    for method in service.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = getattr(channel, _kind(method))(
            f"/{service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
            _registered_method=True,
        )
        yield method.name, call


class Stub:
    """A client of a service, with one callable for each method."""

    def __init__(self, service: ServiceDescriptor, channel: Any) -> None:
        self.__dict__.update(_calls(service, channel))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the service has no method {name!r}.")


def add_service(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Let a server answer calls of this service by the servicer's methods, which bear the names of the service's."""
    handlers = {}
    for method in service.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        handlers[method.name] = getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)
