"""The client of ridgeline.v1.Inference, by the name that protoc's plugin gives it."""

from __future__ import annotations

from typing import Any

from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2
from ridgeline.serving.grpc.proto.services import Stub

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]


class InferenceStub(Stub):
    def __init__(self, channel: Any) -> None:
        super().__init__(SERVICE, channel)
