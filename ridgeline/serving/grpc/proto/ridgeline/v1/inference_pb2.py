"""The messages of inference.proto, by the name that protoc gives them."""

from ridgeline.serving.grpc.proto.services import load

DESCRIPTOR = load(__file__, globals())
