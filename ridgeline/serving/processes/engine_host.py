"""The engine and the API servers it works for: messages in, steps, messages out. API servers handle text."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from msgspec.structs import replace

from ridgeline.assembly import Assembly, assemble
from ridgeline.core.errors import CannotPromise, DeviceLost, InvalidConfig, InvalidRequest, RidgelineError
from ridgeline.core.plan.octets import SharedOctets, open_all
from ridgeline.core.plan.request import Request, RequestStats, StepEvents, TokenEvent, TokenMask
from ridgeline.core.plan.sleep import Kind
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.together import SIZES
from ridgeline.core.timeline import Timeline
from ridgeline.engine.protocol import RunsRequests
from ridgeline.kernels.base.cost import Headroom
from ridgeline.ranks.recruits import Recruits
from ridgeline.serving.grammars.masks import Busy, Grammars
from ridgeline.serving.observed.engine_stats import EngineStats
from ridgeline.serving.observed.gpus import Gpus
from ridgeline.serving.observed.past import Past
from ridgeline.serving.observed.recent import RecentRequests
from ridgeline.serving.processes.adapters import EngineAdapters
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.serving.processes.lifeline import tell_mistake, tell_ready
from ridgeline.serving.processes.loaded import Loaded
from ridgeline.serving.processes.pulse import COMPILING, FIRST_STEP, LOADING, Pulse
from ridgeline.serving.processes.turn import Turn, waits
from ridgeline.serving.processes.updates import Updates
from ridgeline.transport.messages import (
    AS_THEY_ARE,
    AdapterAnswer,
    Ask,
    BeginWeights,
    Begun,
    CacheCounted,
    Cancel,
    Count,
    Ended,
    EndWeights,
    Event,
    Forget,
    Forgot,
    FromFace,
    Hello,
    LoadAdapter,
    Look,
    MeetTrainer,
    Pause,
    Progress,
    Refused,
    Reload,
    Resume,
    Seen,
    Sleep,
    Standing,
    Stats,
    Submit,
    TakeWeights,
    UnloadAdapter,
    Wake,
    Welcome,
)
from ridgeline.transport.zmq import EngineSocket
from ridgeline.weights.folder import resolve_tokenizer
from ridgeline.worker.early import Early

logger = logging.getLogger(__name__)

STATS_PERIOD = 1.0  # seconds
RESTING = 1e-3  # seconds between two pieces of what is left to do while there is no request
IDLE_WAIT = 0.25  # seconds: the longest time for which a signal goes unseen while nothing happens
SLOWER = 10  # times as long as a step of most tokens should take, by the best rate so far, it may take
FAREWELL = 0.2  # seconds for the last messages of an engine that cannot go on
GRAMMAR_RETRY = 2  # seconds after which to try again, when there was no time to compile
LOST = 3  # exit code of an engine whose device is lost
GRAMMAR_WAIT = 0.002  # seconds between looks at grammars that are being compiled, while nothing else happens


class EngineHost:
    """An engine and the API servers it works for."""

    def __init__(
        self,
        assembly: Assembly,
        config: LLMConfig,
        socket: EngineSocket,
        settings: EngineSettings,
        turn: Turn | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._socket, self._pulse = socket, pulse or Pulse()
        who = settings.served_name, settings.life
        self._adapters = EngineAdapters(settings)
        self._loaded = Loaded(assembly, config, *who, turn or Turn(), self._note_end, self._adapters)
        self._updates = Updates(self._loaded)
        self._loaded.name_weights(self._updates.version)
        self._engine.on_begin(self._note_begin)
        facts, tokenizer = self._loaded.facts, resolve_tokenizer(assembly.folder, config)
        self._grammars = Grammars(tokenizer, facts.vocab_size, facts.eos_ids, settings.grammar_timeout)
        # ranks have a bound of their own, which their leader keeps, and says more when it is exceeded
        least = config.distributed_timeout_seconds + config.hang_timeout if config.ranks > 1 else 0.0
        self._steps = StepBound(facts.max_num_batched_tokens, least)
        self._gpus = Gpus(str(assembly.device))
        self._api_servers: dict[bytes, str] = {}  # connection → name
        self._owners: dict[str, tuple[bytes, int]] = {}  # request → connection, the request's number there
        self._over: dict[str, tuple[Request, RequestStats]] = {}  # ended, and not reported yet
        self._stats, self._past = EngineStats(), Past(settings.socket)
        self._recent = RecentRequests()
        self._stats_due = 0.0
        self._stopped = False
        self._standing: Literal["running", "draining", "paused"] = "running"
        self._held: list[tuple[bytes, Submit, TokenMask | Exception | None]] = []  # came while the others drain
        self._pausing: list[tuple[bytes, Pause]] = []  # orders not obeyed yet
        self._goes_on = False  # after these orders: it ran before, and no order has kept it from that

    @property
    def _engine(self) -> RunsRequests:
        return self._loaded.engine

    def stop(self) -> None:
        self._stopped = True

    def begin_asleep(self) -> None:
        """Leave the devices to others until an order wakes this engine up."""
        self._freeze()
        try:
            self._loaded.fall_asleep(1)
        except InvalidConfig:  # weights that cannot be kept are loaded again
            self._loaded.fall_asleep(2)

    def run(self) -> None:
        """Run until `stop`. Raise DeviceLost if the device is lost."""
        working = False
        while not self._stopped:
            self._pulse.turn()
            waits = self._grammars.pending or self._adapters.pending
            wait = 0.0 if self._engine.has_work else GRAMMAR_WAIT if waits else self._rest()
            for connection, message in self._socket.receive(wait):
                self._take(connection, message)
            if self._engine.has_work and not working and len(self._api_servers) > 1:
                self._broadcast()  # a step may be long, and API servers that have no part in it must know that it runs
            working = self._engine.has_work
            if self._grammars.pending:
                for connection, submit, mask in self._grammars.done():
                    self._begin(connection, submit, mask)
            for connection, answer in self._adapters.done(self._loaded.worker):
                self._answer_adapter(connection, answer)
            if self._engine.has_work:
                self._step()
            self._adapters.forget(self._engine.scheduler, self._loaded.worker)
            if self._updates.given_up():
                self._give_up_update()
            if self._standing != "running":
                self._settle()
            if time.monotonic() >= self._stats_due:
                self._broadcast()
        self._loaded.shutdown()
        self._socket.close()

    def _rest(self) -> float:
        """Do a piece of what is left to do while there is no request, and return how long to wait for one."""
        return RESTING if not self._loaded.asleep and self._engine.rest() else IDLE_WAIT

    # ---- messages ---------------------------------------------------------------------------------------------

    def _take(self, connection: bytes, message: FromFace) -> None:
        """Act on a message. If a message that could be decoded is wrong, only that message fails."""
        try:
            self._do(connection, message)
        except Exception:
            logger.exception("a message of the kind %s could not be handled", type(message).__name__)
            if isinstance(message, Submit):
                self._socket.send(connection, Refused(id=message.id, error="the engine could not take the request."))

    def _do(self, connection: bytes, message: FromFace) -> None:
        match message:
            case Submit(grammar=None):
                self._begin(connection, message, None)
            case Submit():
                try:
                    self._grammars.compile(connection, message)
                except Busy as busy:
                    self._begin(connection, message, busy)
            case Cancel():
                self._cancel(connection, message)
            case Hello():
                for other in [c for c, name in self._api_servers.items() if name == message.name and c != connection]:
                    self._forget(other)
                self._api_servers[connection] = message.name
                self._socket.send(connection, Welcome(facts=self._loaded.facts))
            case Ask():
                self._socket.send(connection, self._message())
            case Pause():
                self._pause(connection, message)
            case Wake():
                self._wake(connection, message.kinds)
            case Resume():
                self._resume(connection)
            case Look():
                self._socket.send(connection, Seen(lives=self._recent.look(message, self._so_far)))
            case Count():
                self._socket.send(connection, CacheCounted(caches=self._engine.census()))
            case LoadAdapter():
                asleep = "the engine is asleep; wake it up first." if self._loaded.asleep else ""
                if error := asleep or self._adapters.begin(connection, message, self._loaded.worker):
                    self._socket.send(connection, AdapterAnswer(id=message.id, error=error))
            case UnloadAdapter():
                self._answer_adapter(connection, self._adapters.unload(message))
            case Forget():
                self._engine.forget_prefixes()
                self._socket.send(connection, Forgot())

    def _begin(self, connection: bytes, submit: Submit, mask: TokenMask | Exception | None) -> None:
        """Queue a request. If anything is wrong with it, tell its API server: one request must never hurt the
        others."""
        if self._standing == "draining":
            self._held.append((connection, submit, mask))
            return
        name = _name(connection, submit.id)
        try:
            if isinstance(mask, Exception):
                raise mask
            request = _request(name, submit, mask)
            open_all(_octets(request))  # now, while the API server is sure to hold them
            self._adapters.check(request)
            self._engine.add(request)
        except Busy as error:
            self._socket.send(connection, Refused(id=submit.id, error=str(error), retry_after=GRAMMAR_RETRY))
        except CannotPromise as error:
            told = Refused(id=submit.id, error=str(error), param=error.param, retry_after=error.retry_after)
            self._socket.send(connection, told)
        except InvalidRequest as error:
            self._socket.send(connection, Refused(id=submit.id, error=str(error), param=error.param))
        except Exception as error:
            logger.exception("a request could not be queued")
            self._socket.send(connection, Refused(id=submit.id, error=f"the request could not be queued: {error}"))
        else:
            self._owners[name] = connection, submit.id
            self._adapters.enter(request)
            # the completions of one request have consecutive numbers
            self._stats.note_arrival(request, _name(connection, submit.id - submit.index))
            self._recent.begin(name, submit)

    def _cancel(self, connection: bytes, message: Cancel) -> None:
        for number in self._grammars.cancel(connection, message.ids):
            self._socket.send(connection, Refused(id=number, error="the request was cancelled."))
        if self._held:
            ids = set(message.ids)
            cancelled = [held for held in self._held if held[0] == connection and held[1].id in ids]
            self._held = [held for held in self._held if held not in cancelled]
            for _, submit, _ in cancelled:
                self._socket.send(connection, Refused(id=submit.id, error="the request was cancelled."))
        names = dict.fromkeys(_name(connection, number) for number in message.ids)
        found = [name for name in names if name in self._owners]
        for name in found:
            self._engine.abort(name, message.at_token)
        ended = [self._end(name, "abort" if message.at_token is None else "stop") for name in found]
        if ended:
            self._socket.send(connection, Progress(ids=[], token_ids=[], events=[], ended=ended))

    def _answer_adapter(self, connection: bytes, answer: AdapterAnswer) -> None:
        """Tell every API server the adapters that there are, and then the one that asked."""
        if not answer.error:
            self._loaded.list_adapters()
            for each in self._api_servers:
                self._socket.send(each, Welcome(facts=self._loaded.facts))
        self._socket.send(connection, answer)

    # ---- pauses -----------------------------------------------------------------------------------------------

    def _pause(self, connection: bytes, order: Pause) -> None:
        """Begin to pause, unless the order is refused. `_settle` does the rest, and answers."""
        mode = order.mode
        try:
            self._updates.check(order)
            self._loaded.check(order)
        except Exception as refusal:
            if self._pausing:  # which are answered first
                self._pausing.append((connection, order))
            else:
                self._answer(connection, self._reason(refusal))
            return
        logger.info("a pause is asked for (%s): %d requests are here", mode, len(self._owners) + len(self._held))
        self._pausing.append((connection, order))
        self._goes_on = self._goes_on or self._standing == "running"
        if mode == "abort":
            for name, (owner, number) in list(self._owners.items()):
                self._engine.abort(name)
                self._end(name, "abort")
                why = "the engine was paused while it had this request; send it again."
                self._socket.send(owner, Refused(id=number, error=why, paused=True))
        if mode == "wait" and self._standing == "running":
            self._standing = "draining"
        elif mode != "wait":
            self._freeze()

    def _freeze(self) -> None:
        self._standing = "paused"
        self._engine.pause()
        self._release()

    def _settle(self) -> None:
        """Go from draining to paused once no request is left, and obey orders one after the other once no step runs. A
        pause of which nothing is left, because its API server is gone, is over then."""
        if self._standing == "draining" and not self._owners:
            self._freeze()
        if self._standing != "paused" or self._engine.has_work:
            return
        obeyed = []
        while self._pausing:
            connection, order = self._pausing.pop(0)
            obeyed.append((connection, self._obey(connection, order)))
        if self._goes_on and not self._loaded.asleep:
            self._go_on()
        for connection, error in obeyed:
            self._answer(connection, error)

    def _end_update(self, order: EndWeights) -> None:
        """End an update of the weights, and let every API server know their version."""
        here = [(name, self._known(name).output_tokens) for name in self._owners]
        if self._updates.end(order, here):
            logger.info("the weights are version %s", self._updates.version)
            self._tell_version()
        self._goes_on = self._goes_on or self._updates.goes_on

    def _tell_version(self) -> None:
        self._loaded.name_weights(self._updates.version)
        for connection in self._api_servers:
            self._socket.send(connection, Welcome(facts=self._loaded.facts))

    def _give_up_update(self) -> None:
        """Go on with the old weights, which are whole, because nothing more came."""
        logger.warning("an update of the weights was not continued; the old ones stay")
        if self._updates.goes_on and self._standing == "paused":
            self._go_on()

    def _obey(self, connection: bytes, order: Pause) -> str:
        """Do what a pause was asked for, and return the reason why that cannot be done, or nothing. Raise DeviceLost if
        the engine cannot go on."""
        self._broadcast()  # that it is paused, before the process may be too busy to speak
        try:
            self._updates.check(order)
            self._loaded.check(order)
            match order:
                case Sleep():
                    with self._pulse.expecting(LOADING, "falling asleep"):
                        self._loaded.fall_asleep(order.level)
                case Reload():
                    self._load_anew(partial(self._loaded.reload, order.path))
                    return ""
                case MeetTrainer():
                    with self._pulse.expecting(LOADING, "meeting a trainer"):
                        self._updates.meet(order)
                    return ""
                case BeginWeights():
                    self._updates.begin(goes_on=self._goes_on)
                case TakeWeights():
                    with self._pulse.expecting(LOADING, "receiving weights"):
                        self._updates.take(order)
                case EndWeights():
                    self._end_update(order)
                    return ""
                case _:
                    self._updates.goes_on = False
                    logger.info("the engine is paused: requests wait until it is resumed")
        except DeviceLost as lost:
            self._answer(connection, str(lost))
            time.sleep(FAREWELL)
            raise
        except Exception as refusal:
            return self._reason(refusal)
        self._goes_on = False
        return ""

    def _reason(self, error: Exception) -> str:
        """Return why an order was not obeyed. Whatever it is, it must not end the engine."""
        known = isinstance(error, RidgelineError)
        logger.warning("an order was not obeyed: %s", error, exc_info=None if known else error)
        return str(error) if known else f"that failed: {type(error).__name__}; the engine's log has more."

    def _load_anew(self, load: Callable[[], None]) -> None:
        """Do what may load the model again. Then tell API servers its facts, and those requests that there is no more
        room for."""
        before = self._loaded.facts
        try:
            with self._pulse.expecting(LOADING, "loading its model"):
                load()
        finally:  # where a folder could not be read, the weights from before were
            self._engine.on_begin(self._note_begin)
            if self._loaded.facts is not before:
                self._updates.forget()
                self._loaded.name_weights(self._updates.version)
            for connection in self._api_servers if self._loaded.facts is not before else ():
                self._socket.send(connection, Welcome(facts=self._loaded.facts))
            no_room, self._loaded.no_room = self._loaded.no_room, []
            for name, error in no_room:
                connection, number = self._owners[name]
                self._end(name, "error")
                self._socket.send(connection, Refused(id=number, error=str(error), param=error.param))

    def _wake(self, connection: bytes, kinds: list[Kind]) -> None:
        self._settle()
        error = ""
        try:
            self._load_anew(partial(self._loaded.wake, kinds))
        except Exception as refusal:
            error = self._reason(refusal)
        if not error and self._loaded.complete:
            self._go_on()
        self._answer(connection, error)

    def _resume(self, connection: bytes) -> None:
        self._settle()
        if refusal := self._updates.refusal:
            self._answer(connection, f"the engine cannot go on: {refusal}")
            return
        if self._loaded.asleep:
            self._answer(connection, "the engine is asleep; POST /wake_up first.")
            return
        self._go_on()
        self._answer(connection, "")

    def _go_on(self) -> None:
        if self._standing != "running":
            logger.info("the engine goes on: %d requests have waited", len(self._owners) + len(self._held))
        self._standing, self._goes_on = "running", False
        self._loaded.go_on()
        self._release()
        overtaken, self._pausing = self._pausing, []
        for connection, _ in overtaken:
            self._answer(connection, "the engine was resumed before it had paused.")

    def _release(self) -> None:
        """Queue the requests that came while others drained."""
        held, self._held = self._held, []
        for connection, submit, mask in held:
            self._begin(connection, submit, mask)

    def _answer(self, connection: bytes, error: str) -> None:
        """Tell every API server how things stand, and then the one that asked."""
        self._broadcast()
        self._socket.send(
            connection, Standing(paused=self._standing == "paused", asleep=self._loaded.asleep, error=error)
        )

    # ---- steps ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self._engine.headroom
        self._pulse.turn(self._steps.bound, "a step")
        events = self._engine.step()
        now, spent, plan = time.monotonic(), self._engine.headroom.since(before), self._engine.last_plan
        if spent.elapsed > 0 and plan is not None:
            self._steps.note(spent.elapsed, self._engine.last_tokens)
            self._stats.note_step(now, spent, plan, self._engine.last_tokens)
        told = (*events.ids, *(event.request_id for event in events.events if event.token_id >= 0))
        told = tuple(name for name in told if name in self._owners)  # the others were cancelled
        self._stats.note_tokens(told, now, lambda name: self._known(name).cached_tokens)
        for connection, progress in self._sorted(events).items():
            if not self._socket.send(connection, progress):
                self._forget(connection)
        self._stats.end_step()

    def _sorted(self, events: StepEvents) -> dict[bytes, Progress]:
        """Return a step's events by API server, without those of requests that were cancelled meanwhile."""
        owners, found = self._owners, dict[bytes, Progress]()

        def to(connection: bytes) -> Progress:
            if connection not in found:
                found[connection] = Progress(ids=[], token_ids=[], events=[], ended=[])
            return found[connection]

        for name, token_id in zip(events.ids, events.token_ids, strict=True):
            if name in owners:
                connection, number = owners[name]
                progress = to(connection)
                progress.ids.append(number)
                progress.token_ids.append(token_id)
        for event in events.events:
            if event.request_id in owners:
                connection, number = owners[event.request_id]
                to(connection).events.append(_event(number, event))
                if event.finish_reason is not None:
                    to(connection).ended.append(self._end(event.request_id, event.finish_reason))
        return found

    def _note_begin(self, requests: list[Request]) -> None:
        """Tell API servers which requests the next step runs for the first time: this process may not outlive it."""
        found: dict[bytes, list[int]] = {}
        for request in requests:
            if request.id in self._owners:
                self._adapters.note_begin(request.id)
                connection, number = self._owners[request.id]
                found.setdefault(connection, []).append(number)
        for connection, ids in found.items():
            self._socket.send(connection, Begun(ids=ids))

    def _note_end(self, request: Request, stats: RequestStats) -> None:
        """Note a request's end. The scheduler reports it before the event that tells why."""
        self._over[request.id] = request, stats

    def _end(self, name: str, reason: str) -> Ended:
        _, number = self._owners.pop(name)
        self._adapters.leave(name)
        request, stats = self._over.pop(name)
        stats = self._updates.ended(name, stats)
        device = self._stats.note_end(request, stats, reason)
        self._recent.end(name, reason, stats, device)
        return Ended(id=number, stats=stats, device=device)

    def _known(self, name: str) -> RequestStats:
        """Return the statistics of a request that runs, or whose end was not sent yet."""
        return self._over[name][1] if name in self._over else self._engine.scheduler.stats_of(name)

    def _so_far(self, name: str) -> tuple[RequestStats, Headroom]:
        stats = self._known(name)
        begun = stats.first_scheduled
        return stats, Headroom() if begun is None else self._stats.worked(since=begun)

    def _forget(self, connection: bytes) -> None:
        """End the requests of an API server that is gone or does not read."""
        logger.warning("API server %s is gone: its requests are ended", self._api_servers.pop(connection, "?"))
        self._grammars.forget(connection)
        self._held = [held for held in self._held if held[0] != connection]
        self._pausing = [order for order in self._pausing if order[0] != connection]
        for name in [name for name, (owner, _) in self._owners.items() if owner == connection]:
            self._engine.abort(name)
            self._end(name, "abort")

    # ---- figures ----------------------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        self._stats_due = time.monotonic() + STATS_PERIOD
        message = self._message()
        self._past.note(message)
        for connection in list(self._api_servers):
            if not self._socket.send(connection, message):
                self._forget(connection)

    def _message(self) -> Stats:
        message = self._stats.message(self._loaded.told(), self._gpus.read())
        message = replace(message, counters=message.counters | self._adapters.figures())
        if self._standing == "running":
            return message
        waiting = message.waiting + len(self._held)
        return replace(message, waiting=waiting, paused=self._standing == "paused", asleep=self._loaded.asleep)


class StepBound:
    """The bound on a step's time. What is known of it are the steps so far: a CPU may need minutes for a long prompt.

    bound: in seconds, as `Pulse.turn` takes it. The supervisor's own is in force where that is longer.
    """

    def __init__(self, max_tokens: int, least: float) -> None:
        """max_tokens: of a step. least: the bound that holds in any case."""
        self._max_tokens, self._least = max_tokens, least
        self._best = float("inf")  # seconds of one token, in the step that computed them most cheaply
        self.bound = max(least, FIRST_STEP)

    def note(self, seconds: float, tokens: int) -> None:
        """Note a step."""
        if tokens and seconds / tokens < self._best:
            self._best = seconds / tokens
            self.bound = max(self._least, SLOWER * self._best * self._max_tokens)


def _name(connection: bytes, number: int) -> str:
    return f"{connection.hex()}-{number}"


def _event(number: int, event: TokenEvent) -> Event:
    return Event(
        id=number,
        token_id=event.token_id,
        finish_reason=event.finish_reason,
        logprobs=event.logprobs,
        prompt_logprobs=event.prompt_logprobs,
        error=event.error,
        vector=None if event.vector is None else event.vector.tobytes(),
        tokens=len(event.vector) if event.vector is not None and event.vector.ndim > 1 else 0,
    )


def _request(name: str, submit: Submit, mask: TokenMask | None) -> Request:
    return Request(
        id=name,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        stop_ids=frozenset(submit.stop_ids),
        eos_ids=frozenset(submit.eos_ids),
        lookahead=2 if mask is None and submit.thinking is None else 1,
        token_mask=mask,
        owner=submit.owner,
        **{field: getattr(submit, field) for field in AS_THEY_ARE},
    )


def _that_sleep(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an engine that sleeps often. Weights of several ranks, and on AMD, cannot be kept."""
    kept = not torch.version.hip and all(options.get(name, 1) == 1 for name in SIZES)
    return {"enable_sleep_mode": True, **options} if kept else options


def announce_compiling(pulse: Pulse) -> None:
    """Let a step announce that it compiles a kernel, which takes longer than steps do."""
    import triton  # here, because CPUs do without it

    def announce(**_: Any) -> bool:
        pulse.turn(COMPILING, "compiling a kernel")
        return False  # go on

    triton.knobs.runtime.jit_cache_hook = announce


def run(
    settings: EngineSettings, pulse: Pulse, recruits: Recruits | None, timeline: Timeline, early: Early | None
) -> None:
    """Load the model and serve it until SIGTERM.

    recruits: processes for its ranks that were started already. timeline: of the start so far. early: what was begun
    beside it.
    """
    turn = Turn(settings.turn)
    try:
        config = LLMConfig(**(_that_sleep(settings.options) if settings.turn else settings.options))
        pulse.turn(float("inf"), "waiting for its turn")
        turn.wait(Turn(waits(settings.socket) if settings.turn else None))
        pulse.turn(LOADING, "loading its model")
        progress = partial(_note_progress, pulse)
        assembly = assemble(config, progress, interactive=True, recruits=recruits, timeline=timeline, early=early)
        with timeline.stage("tokenizer"):
            host = EngineHost(assembly, config, EngineSocket(settings.socket), settings, turn, pulse)
    except RidgelineError as error:
        tell_mistake(error)
    if (target := assembly.engine.config.itl_target) is not None:
        logger.info("steps with prompts take about %.3g ms at most while requests decode (--itl-target)", 1e3 * target)
    if settings.asleep:
        host.begin_asleep()
    if assembly.device.type != "cpu":
        announce_compiling(pulse)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    tell_ready()
    logger.info("the engine was ready after %s", timeline)
    try:
        host.run()
    except DeviceLost as error:
        logger.critical("%s", error)
        os._exit(LOST)  # at once, because tidying up would wait for the device


def _note_progress(pulse: Pulse, what: str, share: float) -> None:
    pulse.turn(LOADING, what)


def _octets(request: Request) -> Iterator[SharedOctets]:
    """Yield the pixels and samples of a request, each once."""
    if request.sound is not None:
        yield request.sound.samples
    for shown in {id(each.shown): each.shown for each in request.inserted}.values():
        yield from () if shown is None else shown.pictures
    for heard in {id(each.heard): each.heard for each in request.inserted}.values():
        yield from () if heard is None else (heard.samples,)
