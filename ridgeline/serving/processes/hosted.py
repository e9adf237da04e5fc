"""A server without a listener of its own, for programs that bring one, such as Ray Serve and Triton: an engine in a
process of its own, and the API server before it in the caller's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.processes.engine_settings import MODULE, EngineSettings, encode, patience_of
from ridgeline.serving.processes.keeper import ChildProcess, Keeper
from ridgeline.serving.processes.runtime import RuntimeDirectory


class HostedServer:
    """An engine with the API server before it (`api`). An engine that dies or hangs is started again. `name` is unlike
    any other API server's, and `environment` holds the variables of the engine's process.

    Make and use it in one event loop. Raise RidgelineError if the model's texts cannot be used.
    """

    def __init__(
        self, config: ServeConfig, model: NamedModel, name: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._directory = RuntimeDirectory()
        model = replace(model, names=config.served_model_name or model.names, sockets=(str(self._directory.socket(0)),))
        try:
            self.api = ApiServer.build(config, model, name)
        except BaseException:
            self._directory.remove()
            raise
        settings = encode(EngineSettings.of(config, model))
        self._engine = Keeper(
            ChildProcess("engine", MODULE, lambda life: settings, environment=environment),
            patience=patience_of(config),
            on_hung=self.api.client.give_up,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the engine, and wait until it is up. Raise GaveUp if it cannot be, and end everything."""
        self._tasks = [asyncio.create_task(self._engine.keep()), asyncio.create_task(self.api.client.run())]
        up = asyncio.create_task(self.api.client.wait_until_up())
        try:
            await asyncio.wait({up, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            self.raise_what_ended()
        except BaseException:
            await self.close()
            raise

    def raise_what_ended(self) -> None:
        """Raise the error that ended the work for good, if one did: GaveUp for an engine that cannot be started."""
        for task in self._tasks:
            if task.done():
                task.result()

    def kill(self) -> None:
        """End the engine at once."""
        self._engine.kill()
        self._directory.remove()

    async def close(self) -> None:
        """End the engine at once, and wait until it is gone."""
        self._engine.kill()
        if self._tasks:
            keeping, running = self._tasks
            await asyncio.wait([keeping])
            running.cancel()
            await asyncio.wait([running])
        self._directory.remove()
