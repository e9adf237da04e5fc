"""The client of the Open Inference Protocol, by the name that protoc's plugin gives it."""

from __future__ import annotations

from typing import Any

from ridgeline.serving.grpc.proto import kserve_pb2
from ridgeline.serving.grpc.proto.services import Stub

SERVICE = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class GRPCInferenceServiceStub(Stub):
    def __init__(self, channel: Any) -> None:
        super().__init__(SERVICE, channel)
