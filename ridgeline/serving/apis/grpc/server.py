"""The gRPC server of an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.grpc.generate import InferenceService
from ridgeline.serving.apis.grpc.guard import Guard
from ridgeline.serving.apis.grpc.health import Health
from ridgeline.serving.apis.grpc.kserve import KServeService
from ridgeline.serving.apis.grpc.running import Running
from ridgeline.serving.apis.grpc.unknown import make_server
from ridgeline.serving.grpc.proto import kserve_pb2_grpc
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2_grpc
from ridgeline.serving.grpc.proto.services import add_service

SERVICES = inference_pb2_grpc.SERVICE.full_name, kserve_pb2_grpc.SERVICE.full_name
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    # Clients that vanished without a word are noticed, and their requests end.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may ping too, without being told that they do it too often.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


async def start(api: ApiServer, address: str) -> grpc.aio.Server:
    """Serve on `address` ("host:port", or "unix:path"). Raise RuntimeError if the address is taken.

    To drain: set `api.service.admission.draining`, wait until its `open_requests` are 0, then `stop` the server.
    Several API servers listen on one port, and the kernel spreads connections over them.
    """
    config = api.config
    options = [*OPTIONS, ("grpc.max_receive_message_length", config.max_body_bytes)]
    options.append(("grpc.so_reuseport", int(config.api_server_count > 1)))
    keys = (*config.api_key, *config.admin_key) if config.api_key else ()
    server = make_server((Guard(keys, config.trusted_key),), options)
    running = Running()
    add_service(inference_pb2_grpc.SERVICE, InferenceService(api, running), server)
    add_service(kserve_pb2_grpc.SERVICE, KServeService(api, running), server)
    health_pb2_grpc.add_HealthServicer_to_server(Health(api, SERVICES), server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    credentials = _credentials(config)
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    await server.start()
    return server


def _credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """Return the credentials for TLS, with the same certificate as HTTPS, or None without one."""
    if config.ssl_keyfile is None or config.ssl_certfile is None:
        return None
    pair = Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes()
    roots = Path(config.ssl_ca_certs).read_bytes() if config.ssl_ca_certs else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=config.ssl_cert_reqs == 2)
