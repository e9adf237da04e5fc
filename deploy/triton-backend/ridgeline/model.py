"""Ridgeline as a back end of Triton Inference Server, with the tensors of Triton's vLLM back end.

    pip install '.[serve]'                          # in a clone, into the Python that Triton runs
    cp -r deploy/triton-backend/ridgeline /opt/tritonserver/backends/
    tritonserver --model-repository deploy/triton-backend/models

Each instance has an engine in a process of its own, which batches all requests that are under way. Triton passes them
on one by one (max_batch_size 0), and `execute` returns at once, so that many run together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import triton_python_backend_utils as pb_utils
from triton_figures import Figures
from triton_tensors import Asked, complete, failed, read, responses

from ridgeline.cli.serve import config_of, of_model_json, one_model
from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.errors import Aborted
from ridgeline.serving.processes.hosted import HostedServer
from ridgeline.serving.processes.logs import set_up_logging
from ridgeline.serving.processes.placement import VISIBLE
from ridgeline.serving.repository.folder import engine_settings
from ridgeline.serving.requests.bodies import CompletionBody
from ridgeline.serving.requests.validation import completion_requests, parse
from ridgeline.transport.messages import Stats

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

ASKED_EVERY = 0.1  # seconds between two looks which requests were cancelled
SHOWN_EVERY = 1.0  # seconds between two figures of the engine on Triton's page of metrics


class TritonPythonModel:
    """What Triton makes for each instance of a model, and calls."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors to a model's configuration, which need not name any."""
        return complete(config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start an engine. An error here is what Triton says of the model."""
        config = json.loads(args["model_config"])
        self._streams = pb_utils.using_decoupled_model_transaction_policy(config)
        self._loop, self._sender = asyncio.new_event_loop(), Sender()
        self._threads = [threading.Thread(target=work) for work in (self._loop.run_forever, self._sender.run)]
        for thread in self._threads:
            thread.start()
        try:
            self._server = self._wait_for(started(args, config))
            self._sender.figures = Figures(model=args["model_name"], version=args["model_version"])
            self._showing = asyncio.run_coroutine_threadsafe(self._show(), self._loop)
        except BaseException:
            self._end()
            raise

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin these requests, and return at once."""
        for request in requests:
            answer = Answer(request.get_response_sender(), self._sender)
            try:
                asked = read(request, streams=self._streams)
            except Exception as error:
                answer.send(failed(error), last=True)
            else:
                self._loop.call_soon_threadsafe(self._begin, asked, answer)

    def finalize(self) -> None:
        self._showing.cancel()
        self._wait_for(self._server.close())
        self._end()

    def _begin(self, asked: Asked, answer: Answer) -> None:
        task = self._loop.create_task(self._run(asked, answer))
        self._sender.watch(answer, lambda: self._loop.call_soon_threadsafe(task.cancel))

    async def _run(self, asked: Asked, answer: Answer) -> None:
        api = self._server.api
        try:
            body = parse(CompletionBody, {**asked.fields, "prompt": asked.text})
            [request] = await completion_requests(api, body, uuid.uuid4().hex)
            async with api.service.run(request.within(asked.timeout)) as run:
                async for response, last in responses(run, asked):
                    answer.send(response, last=last)
        except asyncio.CancelledError:
            answer.send(failed(Aborted("the request was cancelled.")), last=True)
        except Exception as error:
            answer.send(failed(error), last=True)

    async def _show(self) -> None:
        """Keep the engine's figures on Triton's page of metrics."""
        while True:
            if (stats := await self._server.api.client.ask()) is not None:
                self._sender.show(stats)
            await asyncio.sleep(SHOWN_EVERY)

    def _wait_for(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._sender.stop()
        for thread in self._threads:
            thread.join()
        self._loop.close()


class Sender:
    """The thread that speaks with Triton, which takes a part of a millisecond each time: it sends responses, asks which
    requests were cancelled, and shows the engine's `figures`.

    All of it happens while a request is open. Triton ends an instance that has none, and a call that meets the end
    would never return, nor let the instance go.
    """

    figures: Figures | None = None

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[Answer, Callable[[], object]] = {}
        self._newest: Stats | None = None

    def watch(self, answer: Answer, cancel: Callable[[], object]) -> None:
        """Call `cancel` if the request is cancelled before its last response."""
        self._work.put(lambda: self._watch(answer, cancel))

    def send(self, answer: Answer, response: Any, *, last: bool) -> None:
        self._work.put(lambda: self._send(answer, response, last))

    def show(self, stats: Stats) -> None:
        """Show the engine's figures, now if a request is open, else when one begins."""
        self._work.put(lambda: self._show(stats))

    def stop(self) -> None:
        self._work.put(None)

    def run(self) -> None:
        due = 0.0
        while (work := self._next(due)) is not None:
            try:
                work()
                if self._open and (now := time.monotonic()) >= due:
                    due = now + ASKED_EVERY
                    self._ask()
            except Exception:  # of one request, which must not end the others'
                logger.exception("a call of Triton failed")

    def _next(self, due: float) -> Callable[[], None] | None:
        try:
            return self._work.get(timeout=max(0.0, due - time.monotonic()) if self._open else None)
        except queue.Empty:
            return lambda: None

    def _send(self, answer: Answer, response: Any, last: bool) -> None:
        if last:
            self._open.pop(answer, None)
            if not self._open and self.figures is not None:
                self.figures.rest()
        answer.responses.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def _watch(self, answer: Answer, cancel: Callable[[], object]) -> None:
        self._open[answer] = cancel
        if self._newest is not None:
            self._show(self._newest)

    def _show(self, stats: Stats) -> None:
        self._newest = stats
        if self._open and self.figures is not None:
            self.figures.show(stats)

    def _ask(self) -> None:
        for answer, cancel in list(self._open.items()):
            if answer.responses.is_cancelled():
                cancel()


class Answer:
    """The responses to one request. What would follow the last one is dropped."""

    def __init__(self, responses: Any, sender: Sender) -> None:
        self.responses, self._sender, self._ended = responses, sender, False

    def send(self, response: Any, *, last: bool) -> None:
        if not self._ended:
            self._ended = last
            self._sender.send(self, response, last=last)


# ---- the engine -----------------------------------------------------------------------------------------------------


async def started(args: Mapping[str, str], config: Mapping[str, Any]) -> HostedServer:
    """Return a server for an instance of a model, with its engine up. Raise RidgelineError."""
    set_up_logging(as_json=False)
    folder = args["model_repository"]  # the model's own, in spite of its name
    parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
    settings, lines = of_model_json(engine_settings(Path(folder), args["model_version"], parameters), folder)
    for line in lines:
        logger.warning("%s: %s", folder, line)
    kind = args["model_instance_kind"]
    if kind == "CPU":
        settings.setdefault("device", "cpu")
    serve_config, engine = config_of(settings, source=folder)
    environment = seeing(args["model_instance_device_id"]) if kind == "GPU" else os.environ
    if kind == "GPU" and engine.ranks > 1:
        divided = " and ".join(engine.divided_by)
        raise InvalidConfig(f"{folder}: an instance of KIND_GPU has one GPU; for {divided} use KIND_MODEL.")
    own, model = one_model(serve_config)
    server = HostedServer(own, model, f"triton-{uuid.uuid4().hex[:12]}", environment)
    await server.start()
    return server


def seeing(gpu: str) -> Mapping[str, str]:
    """Return the environment of a process that has this GPU alone. Triton numbers those that it sees itself."""
    names = os.environ.get(VISIBLE)
    return {**os.environ, VISIBLE: names.split(",")[int(gpu)] if names else gpu}
