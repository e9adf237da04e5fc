"""The gRPC server of a face."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ridgeline.core.serving import ServeConfig
from ridgeline.serving.face import Face
from ridgeline.serving.grpc.generate import InferenceService
from ridgeline.serving.grpc.guard import Guard
from ridgeline.serving.grpc.health import Health
from ridgeline.serving.grpc.kserve import KServeService
from ridgeline.serving.grpc.proto import kserve_pb2, kserve_pb2_grpc
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2, inference_pb2_grpc
from ridgeline.serving.grpc.running import Running

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)


async def start(face: Face, address: str) -> grpc.aio.Server:
    """Serve on `address` ("host:port", or "unix:path"). Raises RuntimeError where that is taken.

    To drain: set `face.service.admission.draining`, wait until its `open_requests` are 0, then `stop` the server.
    Several faces listen on one port, and the kernel spreads connections over them.
    """
    config = face.config
    server = grpc.aio.server(
        interceptors=[Guard(config.api_key)],
        options=[
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(config.api_server_count > 1)),
        ],
    )
    running = Running()
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(face, running), server)
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(KServeService(face, running), server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(face, SERVICES), server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    credentials = _credentials(config)
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    await server.start()
    return server


def _credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """The same certificate as HTTPS has."""
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        return None
    pair = Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes()
    return grpc.ssl_server_credentials([pair])
