"""The process of one rank: it assembles its part of the model, then does what the leader says.

The thread that reads the leader's messages submits plans. Another one waits for their results and sends them. A third
reports twice a second that the process runs, and ends it when the leader has died.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

import numpy as np

from ridgeline.core.errors import DeviceLost, RidgelineError
from ridgeline.core.plan.step import Feature, StepResult
from ridgeline.ranks.channel import Channel, Closed
from ridgeline.ranks.messages import (
    AdapterRead,
    AddAdapter,
    Alive,
    Answer,
    Ask,
    Begin,
    Done,
    Followed,
    FromLeader,
    FromRank,
    Loading,
    Look,
    MeetTrainer,
    Mistake,
    Move,
    MoveBelow,
    PlanReceiver,
    Ready,
    RemoveAdapter,
    Round,
    SentMasks,
    SentPlan,
    Settle,
    Stop,
    TakeWeights,
    Watch,
    decode_from_leader,
    encode,
)
from ridgeline.ranks.orphan import GONE
from ridgeline.worker.inputs import Shape
from ridgeline.worker.local import LocalWorker

logger = logging.getLogger(__name__)

BEAT = 0.5  # seconds between signs of life
BROKEN = 4  # exit code of a rank that met an error of its own

Progress = Callable[[str, float], None]
T = TypeVar("T")


class Assemble(Protocol):
    """Makes a rank's worker."""

    def __call__(self, begin: Begin, progress: Progress | None) -> tuple[LocalWorker, Ready]: ...


def run(descriptor: int, assemble: Assemble) -> None:
    """Be the rank at this end of a pair of sockets until the leader says stop or is gone."""
    leader = Leader(Channel(socket.socket(fileno=descriptor), None))  # it reads when it wants results, maybe in hours
    threading.Thread(target=_beat, args=(leader,), daemon=True).start()
    begin = leader.receive()
    assert isinstance(begin, Begin)
    progress = _Throttled(leader) if begin.rank == 0 else None
    try:
        worker, ready = assemble(begin, progress)
    except Exception as error:
        leader.send(_mistake(error, f"rank {begin.rank} could not be assembled"))
        return
    leader.send(ready)
    Rank(worker, leader, speaks=begin.speaks).serve()


class Leader:
    """The leader, as a rank sees it. If it is gone the process ends at once, because its results have no reader."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: FromRank) -> None:
        try:
            self._channel.send(encode(message))
        except Closed:
            os._exit(GONE)

    def receive(self) -> FromLeader:
        try:
            frame = self._channel.receive(None)
        except Closed:
            os._exit(GONE)
        assert frame is not None
        return decode_from_leader(frame)


class Rank:
    """A worker that does what a leader says. speaks: the leader wants all of its results."""

    def __init__(self, worker: LocalWorker, leader: Leader, *, speaks: bool) -> None:
        self._worker, self._leader, self._speaks = worker, leader, speaks
        self._plans = PlanReceiver()
        self._submitted: SimpleQueue[threading.Event | None] = SimpleQueue()  # set once all of the plan was launched
        self._masked: dict[int, threading.Event] = {}
        self._watching = ExitStack()
        self._reader = ThreadPoolExecutor(1, "adapters")  # steps go on meanwhile

    def serve(self) -> None:
        """Do what the leader says until it says stop."""
        collector = threading.Thread(target=self._collect, daemon=True)
        collector.start()
        while not isinstance(message := self._leader.receive(), Stop):
            self._take(message)
        self._submitted.put(None)
        self._reader.shutdown()
        for launched in self._masked.values():  # their masks will not be sent any more
            launched.set()
        collector.join()
        self._worker.shutdown()

    def _take(self, message: FromLeader) -> None:
        match message:
            case SentPlan():
                self._submit(message)
            case Round(rows, tokens, each, captured, plan):
                self._worker.expect_round(Shape(rows, tokens, each), captured)
                if plan is not None:
                    self._submit(plan)
                elif (lent := self._worker.lend_experts()) is not None:
                    lent.add_done_callback(_end_if_failed)
            case SentMasks():
                masks = {row: np.array(bits) for row, bits in message.masks.items()}  # writable, as torch wants them
                self._worker.provide_masks(message.plan_id, masks, message.drafts)
                self._masked.pop(message.plan_id).set()
            case Look():
                self._worker.look_next()
            case Move(mixture, takes):
                if (moved := self._worker.move_experts(mixture, takes)) is not None:
                    moved.add_done_callback(_end_if_failed)
            case AddAdapter(number, folder):
                self._reader.submit(self._read_adapter, number, Path(folder))
            case RemoveAdapter(number):
                self._reader.submit(self._worker.remove_adapter, number)
            case MoveBelow(plan, moves):
                self._worker.move(plan, moves)
            case Settle(plan_id):
                self._worker.settle(plan_id)
            case MeetTrainer(meeting):
                self._leader.send(_followed(self._worker.meet_trainer, meeting))
            case TakeWeights(announced):
                self._leader.send(_followed(self._worker.take_weights, announced))
            case Ask():
                self._leader.send(self._answer(message.method))
            case Watch(on=True):
                self._watching.enter_context(self._worker.watching_experts(lambda _: None))
            case Watch():
                self._watching.close()
            case _:
                raise AssertionError(f"a leader does not say {type(message).__name__} now")

    def _submit(self, sent: SentPlan) -> None:
        plan, launched = self._plans.plan(sent), threading.Event()
        if plan.rows.features & Feature.MASK:
            self._masked[plan.id] = launched
        else:
            launched.set()
        self._worker.submit(plan)
        self._submitted.put(launched)

    def _collect(self) -> None:
        try:
            while (launched := self._submitted.get()) is not None:
                launched.wait()
                result = self._worker.collect()
                told = result if self._speaks else _outline(result)
                self._leader.send(Done(told, self._worker.settled() if self._worker.shares else 0))
        except BaseException:  # without this thread the leader would wait for ever
            logger.exception("a rank cannot go on")
            os._exit(BROKEN)

    def _read_adapter(self, number: int, folder: Path) -> None:
        try:
            facts = self._worker.add_adapter(number, folder)
        except Exception as error:
            self._leader.send(AdapterRead(None, _mistake(error, f"the adapter in {folder} could not be read")))
            return
        self._leader.send(AdapterRead(facts))

    def _answer(self, method: str) -> Answer:
        try:
            return Answer(encode(getattr(self._worker, method)()))
        except DeviceLost as error:
            return Answer(b"", str(error))


def _mistake(error: Exception, what: str) -> Mistake:
    """Return an error as the leader is told of it. Others than our own are in the log, with `what` failed."""
    known = isinstance(error, RidgelineError)
    if not known:
        logger.error("%s", what, exc_info=error)
    return Mistake(type(error).__name__ if known else "", str(error) or type(error).__name__)


def _followed(order: Callable[[T], None], what: T) -> Followed:
    try:
        order(what)
    except Exception as error:
        return Followed(_mistake(error, "an order about weights failed"))
    return Followed()


def _end_if_failed(work: Future) -> None:
    """End the process if it could not do its part of a step, for which others wait."""
    if (error := work.exception()) is not None:
        logger.error("a rank cannot lend or move experts", exc_info=error)
        os._exit(BROKEN)


def _outline(result: StepResult) -> StepResult:
    """Return the part of a result that the leader needs from ranks that do not speak for all."""
    told = StepResult(result.plan_id, elapsed=result.elapsed, error=result.error, dropped=result.dropped)
    told = replace(told, experts=result.experts, stamps=result.stamps)
    return replace(told, out_of_memory=result.out_of_memory, device_lost=result.device_lost)


class _Throttled:
    """Tells the leader how far loading is, ten times a second at most."""

    def __init__(self, leader: Leader) -> None:
        self._leader, self._due = leader, 0.0

    def __call__(self, what: str, fraction: float) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + 0.1
            self._leader.send(Loading(what, fraction))


def _beat(leader: Leader) -> None:
    while True:
        leader.send(Alive())
        time.sleep(BEAT)
