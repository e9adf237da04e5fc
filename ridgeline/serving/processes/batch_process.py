"""The process that runs batches. It faces no network: clients leave batches in a folder, by any API server.

    python -m ridgeline.serving.processes.batch_process < settings

It reads one JSON object (`BatchSettings`) from standard input and ends when that closes, because then its parent is
gone. To the engines it is one more API server, whose requests are preempted for all others. SIGTERM ends it at once,
since what it was doing is done by its successor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from ridgeline.core.errors import RidgelineError
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.apis.openai.batches import endpoints_of
from ridgeline.serving.batches.call import call
from ridgeline.serving.batches.runner import Runner
from ridgeline.serving.generation.replicas import Replicas
from ridgeline.serving.http.middleware import with_operators_own
from ridgeline.serving.processes.lifeline import Parent, begin, tell_mistake, tell_ready
from ridgeline.serving.processes.logs import set_up_logging
from ridgeline.serving.processes.pulse import Pulse, turn_with_loop
from ridgeline.serving.stored.store import Store

logger = logging.getLogger("ridgeline.serving.batches")

MANY, FEW = 64, 4  # requests at once: a GPU's step is hardly longer with more rows, and a CPU's in proportion
WAIT = 2.0  # seconds between looks if another process still runs the batches


class BatchSettings(msgspec.Struct, kw_only=True):
    """The settings, as those of an API server. `name` is unlike any API server's, this one's earlier lives among
    them."""

    name: str
    config: ServeConfig
    model: NamedModel


class _Engines:
    """The engines, as the runner asks for them."""

    def __init__(self, client: Replicas) -> None:
        self._client = client

    async def until_up(self) -> None:
        await self._client.wait_until_up()

    def deaths(self) -> int:
        return sum(engine.lives - (engine.facts is not None) for engine in self._client.engines)


async def run(settings: BatchSettings, pulse: Pulse, parent: Parent) -> None:
    """Run batches until SIGTERM."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    config = settings.config
    assert config.batch_dir is not None
    store = Store(Path(config.batch_dir), config.batch_dir_bytes)
    # No client waits for these requests, so they have neither time limits nor a share of the queue, and no client
    # can ask this process for what it keeps.
    unbounded = replace(config, request_timeout=0, queue_timeout=0, max_queue_requests=0, max_queue_tokens=0)
    api = ApiServer.build(replace(unbounded, max_stored_responses=0), settings.model, settings.name)
    api.service.background = True
    parent.listen(lambda news: loop.call_soon_threadsafe(api.client.give_up, news.process_id, news.why))
    for engine in api.client.engines:
        engine.keeps = False  # the runner tries a line again by itself, and alone if it may be what ends engines
    app = create_app(api)
    inside = with_operators_own(app, config.middleware)

    async def work() -> None:
        facts = await api.client.wait_until_up()
        runner = Runner(
            store,
            lambda path, body, name, whose: call(inside, path, body, name, whose),
            _Engines(api.client),
            at_once=config.batch_in_flight or (FEW if facts.device == "cpu" else MANY),
            longest=config.max_body_bytes,
            known=lambda model: model is None or model in api.all_names,
            endpoints=endpoints_of(app),
        )
        await _work(runner)

    tasks = [asyncio.create_task(each) for each in (api.client.run(), work(), stop.wait(), turn_with_loop(pulse))]
    tell_ready()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _work(runner: Runner) -> None:
    """Run the batches as soon as no other process does."""
    told = False
    while (lock := runner.store.lock()) is None:
        if not told:
            logger.warning("another process runs the batches in %s; waiting for its end", runner.store.root)
        told = True
        await asyncio.sleep(WAIT)
    try:
        await runner.run()
    finally:
        os.close(lock)


def main() -> None:
    settings, pulse, parent = begin(BatchSettings)
    set_up_logging(as_json=settings.config.log_json, level=settings.config.log_level)
    try:
        uvloop.run(run(settings, pulse, parent))
    except RidgelineError as error:
        tell_mistake(error)


if __name__ == "__main__":
    main()
