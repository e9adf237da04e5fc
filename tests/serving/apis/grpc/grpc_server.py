"""An API server with its gRPC server, in a thread of its own, and what tests do with it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import grpc

from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.grpc.server import start
from ridgeline.serving.grpc.proto import kserve_pb2_grpc
from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2_grpc
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, PATIENCE, until_idle

T = TypeVar("T")
_names = itertools.count(1)


@dataclass
class GrpcServer:
    """channel: to it, of the blocking kind."""

    api: ApiServer
    address: str
    loop: asyncio.AbstractEventLoop
    server: grpc.aio.Server
    channel: grpc.Channel

    @property
    def stub(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def kserve(self) -> kserve_pb2_grpc.GRPCInferenceServiceStub:
        return kserve_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = PATIENCE) -> T:
        """In the server's loop, which asyncio clients share with it: grpcio knows one loop at a time."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def wait_idle(self, timeout: float = PATIENCE) -> bool:
        """True once the engine runs nothing of this API server's, and nothing is counted as open."""
        return self.run(until_idle(self.api, timeout))


@contextmanager
def serve_grpc(engine_socket: Path, **settings: Any) -> Iterator[GrpcServer]:
    """settings: of ServeConfig."""
    started, found, failures = threading.Event(), list[GrpcServer](), list[BaseException]()
    stop: asyncio.Event

    async def main(address: str) -> None:
        nonlocal stop
        stop = asyncio.Event()
        config = ServeConfig(**{"generation_config": "none", **settings})
        model = NamedModel(str(EMBEDDED_MODEL), (MODEL, "alias"), (str(engine_socket),))
        api = ApiServer.build(config, model, f"grpc-face-{next(_names)}")
        listening = asyncio.create_task(api.client.run())
        await api.client.wait_until_up()
        server = await start(api, address)
        found.append(GrpcServer(api, address, asyncio.get_running_loop(), server, grpc.insecure_channel(address)))
        started.set()
        await stop.wait()
        await server.stop(0)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    def serve(address: str) -> None:
        try:
            asyncio.run(main(address))
        except BaseException as failure:
            failures.append(failure)
            started.set()
            raise

    with TemporaryDirectory() as folder:
        thread = threading.Thread(target=serve, args=(f"unix:{folder}/grpc",), daemon=True)
        thread.start()
        assert started.wait(PATIENCE), "the engine did not answer"
        assert not failures, failures
        try:
            yield found[0]
        finally:
            found[0].channel.close()
            found[0].loop.call_soon_threadsafe(stop.set)
            thread.join(PATIENCE)
