"""The API server's end of its connection to the engine. Requests go out, and each has a ticket into which everything
goes that the engine says about it.

When an engine dies, the requests of which it had said nothing yet wait for the next one, in their old order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

from msgspec.structs import replace

from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.request import Request
from ridgeline.serving import owner
from ridgeline.serving.errors import (
    BadRequest,
    EngineFailed,
    GrammarsBusy,
    NotPromised,
    RequestFailed,
    SlowReader,
    Unavailable,
)
from ridgeline.serving.generation.ticket import RequestTicket, resolve
from ridgeline.transport.messages import (
    AS_THEY_ARE,
    AdapterAnswer,
    AdapterOrder,
    Ask,
    Begun,
    CacheCounted,
    Cancel,
    Count,
    EngineFacts,
    Forget,
    Forgot,
    FromEngine,
    Grammar,
    Hello,
    Life,
    Look,
    Order,
    Progress,
    Refused,
    Seen,
    Standing,
    Stats,
    Submit,
    Welcome,
)
from ridgeline.transport.zmq import FaceSocket

logger = logging.getLogger(__name__)

GREETING_PERIOD = 0.2  # seconds between greetings while no engine answers
RETRY_AFTER = 5  # seconds in which an engine that died is usually back
FORGETTING = 60.0  # seconds for the engine to forget its prefixes, between two steps
RETURN = 900.0  # seconds that requests wait for another engine, which may take minutes to load its model
EXPECTED_OUTPUT = 256  # tokens that a request is expected to write, where it may write more
TYPICAL_WEIGHT = 512.0  # tokens of another API server's request, while this one has none to compare with

NOT_RUNNING = "the engine is not running yet; try again soon."

_Answer = TypeVar("_Answer", Seen, Forgot, CacheCounted, Standing)


class EngineClient:
    """The engine, as an API server sees it.

    `path` is that of its socket, and `name` is the API server's. `facts` is None while no engine answers; `known` keeps
    the newest facts even then. `lives` counts the engines that have answered so far, and `stats` holds the newest
    figures. A reader may be `buffer` tokens behind before its request is cut.

    When the engine dies, `heir` says which one runs a request instead that has nothing yet: the next one here, or
    another that runs the same model. If not `keeps`, requests fail then, and their senders send them again.
    """

    def __init__(self, path: str, name: str, *, buffer: int) -> None:
        self.facts: EngineFacts | None = None
        self.known: EngineFacts | None = None
        self.lives = 0
        self.stats: Stats | None = None
        self.keeps = True
        self.heir: Callable[[RequestTicket], EngineClient] = lambda ticket: self
        self._hung: tuple[int, str] | None = None  # the process that was last given up, and why
        self._given_up = asyncio.Event()
        self.name = name
        self.path, self._buffer = path, buffer
        self._socket: FaceSocket | None = None
        self._tickets: dict[int, RequestTicket] = {}
        self._weight = 0  # of all tickets
        self._others = 0  # other API servers' requests, by the newest figures
        self._numbers = itertools.count(1)
        self._asked: list[asyncio.Future[Stats | None]] = []
        self._questions = defaultdict[type, deque[asyncio.Future[Any]]](deque)  # by the answer's type, oldest first
        self._changes: dict[int, asyncio.Future[AdapterAnswer]] = {}  # orders about adapters, by their ids
        self._up = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None  # runs while requests wait for an engine

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    @property
    def busy(self) -> bool:
        """True if requests run or wait: this API server's or, by the newest figures, another's."""
        return self.num_open > 0 or self._others > 0

    @property
    def asleep(self) -> int:
        """The level at which the engine sleeps; 0: it is awake."""
        return self.stats.asleep if self.facts is not None and self.stats is not None else 0

    @property
    def paused(self) -> bool:
        """True if the engine begins no steps, because it was paused by an order."""
        return self.facts is not None and self.stats is not None and self.stats.paused

    @property
    def load(self) -> float:
        """The engine's work, running and waiting, in tokens. Other API servers' requests count as this one's do on
        average."""
        if not self._others:
            return self._weight
        mean = self._weight / len(self._tickets) if self._tickets else TYPICAL_WEIGHT
        return self._weight + self._others * mean

    @property
    def illness(self) -> str | None:
        """The reason why requests should not come here, or None."""
        if self.facts is None or self._socket is None:
            return f"the engine {self._hung[1]}, and is replaced" if self._hung else "the engine is not running"
        return None if self._socket.connected else "the engine is about to end"

    def give_up(self, process_id: int, why: str) -> None:
        """Take this process for dead, although it is still there: it hangs, and is about to be ended. `why` continues
        "the engine …". Whatever it still says is not heard."""
        if self.facts is not None and self.facts.process_id == process_id:
            self._hung = process_id, why
            self._given_up.set()

    async def wait_until_up(self) -> EngineFacts:
        await self._up.wait()
        assert self.facts is not None
        return self.facts

    async def run(self) -> None:
        """Greet the engine, listen to it until it dies, and greet the next one, until cancelled."""
        try:
            while True:
                self._socket = FaceSocket(self.path)
                try:
                    facts = await self._greet(self._socket)
                    if facts is not None:
                        await self._listen(self._socket, facts)
                finally:
                    self._lose_engine()
        finally:
            self._give_up()

    async def submit(
        self, request: Request, grammar: Grammar | None, *, name: str = "", index: int = 0
    ) -> RequestTicket:
        """Send a request to the engine and return its ticket. Raise Unavailable if no engine is there to run it.

        `name` and `index` say what the client calls the request and which of its completions this is.
        """
        if self.facts is None or self._socket is None:
            raise Unavailable(NOT_RUNNING, retry_after=RETRY_AFTER)
        message = Submit(
            id=next(self._numbers),
            name=name,
            index=index,
            prompt_token_ids=list(request.prompt_token_ids),
            stop_ids=list(request.stop_ids),
            eos_ids=list(request.eos_ids),
            grammar=grammar,
            owner=owner.current(),
            **{field: getattr(request, field) for field in AS_THEY_ARE},
        )
        ticket = RequestTicket(message, self._buffer, weight_of(request))
        self._take_in(ticket)
        self._send_soon(message)
        return ticket

    def adopt(self, ticket: RequestTicket) -> None:
        """Take over a request whose engine is gone and said nothing of it. It is sent as soon as an engine is here."""
        ticket.move(next(self._numbers))
        self._take_in(ticket)
        if self.facts is not None:
            self._send_again(ticket)

    def cancel(self, tickets: Iterable[RequestTicket], at_token: int | None = None) -> None:
        """End the completions that have not ended. Nothing more comes for them, except `ended` where `at_token` is
        given."""
        going = [ticket.id for ticket in tickets if self._tickets.get(ticket.id) is ticket]  # not another engine's
        if at_token is None:
            for number in going:
                self._drop(number)
        if going and self._socket is not None and self.facts is not None:
            self._send_soon(Cancel(ids=going, at_token=at_token))

    def end_all(self, failure: RequestFailed) -> None:
        """End everything under way now, with this failure as the reason."""
        tickets = list(self._tickets.values())
        for ticket in tickets:
            ticket.fail(failure)
        self.cancel(tickets)

    async def ask(self, timeout: float = 1.0) -> Stats | None:
        """Return the figures of this moment, or the newest known ones if the engine does not answer in time."""
        if self.facts is None:
            return self.stats
        future: asyncio.Future[Stats | None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        if len(self._asked) == 1:
            self._send_soon(Ask())
        with suppress(TimeoutError):
            return await asyncio.wait_for(future, timeout)
        return self.stats

    async def look(self, name: str | None = None, limit: int = 1, timeout: float = 1.0) -> list[Life]:
        """Return the course in time of the request with this name, or of the newest requests if no name is given.

        Raise Unavailable if no engine answers in time.
        """
        otherwise = "the engine is not running, and only it knows the requests; try again soon."
        return (await self._answer(Look(name=name, limit=limit), Seen, timeout, otherwise=otherwise)).lives

    async def forget(self, timeout: float = FORGETTING) -> None:
        """Let no later request find anything in the prefix cache. Raise Unavailable if no engine answers in time."""
        await self._answer(Forget(), Forgot, timeout)

    async def census(self, timeout: float = 5.0) -> list[CacheFigures]:
        """Return the figures of the engine's caches. Raise Unavailable if it does not answer in time."""
        return (await self._answer(Count(), CacheCounted, timeout)).caches

    async def order(self, message: Order, timeout: float) -> Standing:
        """Pause the engine, let it sleep, wake it up or let it go on, and return how it stands then. Raise Unavailable
        if it does not answer in time; it may still obey later."""
        late = ", and it will obey as soon as it can; GET /is_paused tells"
        return await self._answer(message, Standing, timeout, late=late)

    async def change_adapters(self, message: AdapterOrder, timeout: float) -> AdapterAnswer:
        """Load or unload an adapter, and return the engine's answer. Raise Unavailable if it does not answer in
        time; it may still obey later."""
        if self.facts is None:
            raise Unavailable(NOT_RUNNING, retry_after=RETRY_AFTER)
        answer = self._changes[message.id] = asyncio.get_running_loop().create_future()
        self._send_soon(message)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            told = f"the engine did not answer within {timeout:g} s; GET /v1/models tells if it obeyed later."
            raise Unavailable(told, retry_after=RETRY_AFTER) from None
        finally:
            self._changes.pop(message.id, None)

    # ---- inside -----------------------------------------------------------------------------------------------

    async def _answer(
        self,
        message: Look | Forget | Count | Order,
        kind: type[_Answer],
        timeout: float,
        *,
        otherwise: str = NOT_RUNNING,
        late: str = "",
    ) -> _Answer:
        """Return the engine's answer to a question. Raise Unavailable with `otherwise` if no engine is there, and with
        `late` if it does not answer in time."""
        if self.facts is None:
            raise Unavailable(otherwise, retry_after=RETRY_AFTER)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._questions[kind].append(answer)
        self._send_soon(message)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            told = f"the engine did not answer within {timeout:g} s{late}."
            raise Unavailable(told, retry_after=RETRY_AFTER) from None

    async def _greet(self, socket: FaceSocket) -> EngineFacts | None:
        """Greet until the engine answers, and return its facts. Return None if it died at once."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_PERIOD):
                    await socket.send(Hello(name=self.name))
                    while True:
                        message = await socket.receive()
                        if isinstance(message, Welcome) and not self._gave_up(message.facts.process_id):
                            return message.facts

    def _gave_up(self, process_id: int) -> bool:
        return self._hung is not None and self._hung[0] == process_id

    async def _listen(self, socket: FaceSocket, facts: EngineFacts) -> None:
        """Take messages until the engine's process is gone."""
        loop = asyncio.get_running_loop()
        try:
            process = os.pidfd_open(facts.process_id)
        except OSError:
            return
        gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(process, resolve, gone)
        self.facts = self.known = facts
        self.lives += 1
        self._hung = None
        self._given_up.clear()
        self._lose_patience()
        for ticket in self._tickets.values():  # before anything that comes from now on
            self._send_again(ticket)
        self._up.set()
        logger.info("engine %d is up: %s on %s", facts.process_id, facts.model, facts.device)
        reader, given_up = asyncio.create_task(self._read(socket)), asyncio.create_task(self._given_up.wait())
        ends: set[asyncio.Future[Any]] = {reader, gone, given_up}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            loop.remove_reader(process)
            os.close(process)
            given_up.cancel()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(self, socket: FaceSocket) -> None:
        while True:
            self._take(await socket.receive())
            # receiving what is there already does not wait, so give the backlog's readers a turn
            await asyncio.sleep(0)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Begun():
                for number in message.ids:
                    if number in self._tickets:
                        self._tickets[number].begun = True
            case Progress():
                self._take_progress(message)
            case Stats():
                self.stats = message
                self._others = max(0, message.running + message.waiting - len(self._tickets))
                self._tell_figures()
            case Seen() | Forgot() | CacheCounted() | Standing():
                resolve(self._questions[type(message)].popleft(), message)
            case AdapterAnswer():
                if (changed := self._changes.pop(message.id, None)) is not None:
                    resolve(changed, message)
            case Refused():
                if (ticket := self._drop(message.id)) is not None:
                    ticket.fail(_refusal(message))
            case Welcome():  # the answer to a greeting that came late, or what a model is that was loaded again
                self.facts = self.known = message.facts

    def _take_progress(self, progress: Progress) -> None:
        tickets, slow = self._tickets, dict[int, RequestTicket]()
        for number, token_id in zip(progress.ids, progress.token_ids, strict=True):
            ticket = tickets.get(number)
            if ticket is not None and not ticket.put(token_id):
                slow[number] = ticket
        for event in progress.events:
            ticket = tickets.get(event.id)
            if ticket is not None and not ticket.put(event):
                slow[event.id] = ticket
        for ended in progress.ended:
            ticket = self._drop(ended.id)
            if ticket is not None:
                slow.pop(ended.id, None)  # it has ended, so there is nothing left to cut
                ticket.ended = ended
                ticket.wake()
        for ticket in slow.values():
            ticket.fail(SlowReader(f"{len(ticket.inbox)} tokens were not read; the request was cut."))
        self.cancel(slow.values())

    def _take_in(self, ticket: RequestTicket) -> None:
        self._tickets[ticket.id] = ticket
        self._weight += ticket.weight

    def _send_again(self, ticket: RequestTicket) -> None:
        assert ticket.submit is not None
        self._send_soon(ticket.submit)

    def _drop(self, number: int) -> RequestTicket | None:
        """Take a completion off the list and return its ticket, or None if it is not on it."""
        if (ticket := self._tickets.pop(number, None)) is not None:
            self._weight -= ticket.weight
        return ticket

    def _lose_engine(self) -> None:
        died, self.facts = self.facts is not None, None
        if self.stats is not None:
            self.stats = replace(self.stats, paused=False, asleep=0)  # its successor runs
        self._up.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._others = 0
        if died:
            self._part()
        self._tell_figures()
        for waiting in chain(self._changes.values(), *self._questions.values()):
            if not waiting.done():
                waiting.set_exception(Unavailable("the engine died.", retry_after=RETRY_AFTER))
        self._questions.clear()

    def _tell_figures(self) -> None:
        """Answer those that asked for figures by the newest ones."""
        for asked in self._asked:
            resolve(asked, self.stats)
        self._asked.clear()

    def _part(self) -> None:
        """End what the dead engine had begun to answer, and keep the other requests."""
        tickets = list(self._tickets.values())
        self._tickets.clear()
        self._weight = 0
        kept = [ticket for ticket in tickets if ticket.outlives_engine() and self.keeps]
        for ticket in set(tickets).difference(kept):
            ticket.fail(self._died())
        for ticket in kept:
            self.heir(ticket).adopt(ticket)
        if tickets:
            how = "died" if self._hung is None else "hangs"
            logger.warning("the engine %s: %d requests end, %d go to another", how, len(tickets) - len(kept), len(kept))
        if self._tickets:
            self._patience = asyncio.get_running_loop().call_later(RETURN, self._give_up)

    def _give_up(self) -> None:
        """End the requests that wait for another engine."""
        self._lose_patience()
        for ticket in list(self._tickets.values()):
            self._drop(ticket.id)
            ticket.fail(self._died())

    def _died(self) -> Unavailable:
        if self._hung is None:
            return Unavailable("the engine died while it ran this request; try again.", retry_after=RETRY_AFTER)
        told = f"the engine {self._hung[1]}, so it is replaced, and this request ended with it; try again."
        return Unavailable(told, retry_after=RETRY_AFTER)

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _send_soon(self, message: Submit | Cancel | Ask | Look | Forget | Count | Order | AdapterOrder) -> None:
        """Send messages in this order, without waiting.

        An engine that dies is gone as a peer before it is gone as a process. What is sent in between is lost, and
        `_lose_engine` sees to it.
        """
        assert self._socket is not None
        self._socket.send(message).add_done_callback(_log_failure)


def weight_of(request: Request) -> int:
    """Return the load that a request is, in tokens: what it reads, and what it will probably write. They stay in the
    cache until it ends, and each step reads them."""
    return request.read_tokens + min(request.max_total_tokens - len(request.prompt_token_ids), EXPECTED_OUTPUT)


def _refusal(message: Refused) -> RequestFailed:
    if message.paused:
        return Unavailable(message.error, retry_after=RETRY_AFTER)
    if message.retry_after is not None and message.param:
        return NotPromised(message.error, param=message.param, retry_after=message.retry_after)
    if message.retry_after is not None:
        return GrammarsBusy(message.error, message.retry_after)
    return BadRequest(message.error, param=message.param) if message.param else EngineFailed(message.error)


def _log_failure(sent: asyncio.Future[None]) -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None:
        logger.warning("a message to the engine was lost: %s", error)
