"""The part of a request's life that REST and gRPC share: from a validated request to pieces of text.

    async with service.run(asked) as run:
        async for piece in run.pieces():
            ...
    run.result  # everything, once the loop has ended

If the block is left early, by an exception or because its task was cancelled, the request ends in the engine within a
step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TypeVar

from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.embeds import Embeds, Inserted
from ridgeline.core.plan.request import BACKGROUND, MASK_FAILED, SamplingParams, Thinking, TokenEvent
from ridgeline.serving import owner, trace_parent
from ridgeline.serving.errors import Aborted, BadRequest, EngineFailed, RequestFailed, TimedOut, Unavailable
from ridgeline.serving.generation.admission import Admission, embedded_bytes
from ridgeline.serving.generation.pieces import Piece, Usage, held, split
from ridgeline.serving.generation.replicas import Replicas
from ridgeline.serving.generation.ticket import RequestTicket
from ridgeline.serving.shares import INLINE_ENTRIES, off_loop
from ridgeline.text.beams import BeamSearchParams
from ridgeline.text.completion import Completion
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.text.parsers.reader import AnswerReader
from ridgeline.text.requests import Heard, RequestLimits, derive_seed, make_requests
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Ended, EngineFacts, Event, Grammar

# The work of starting completions that is done within one turn of the event loop. A completion is 1, and each
# TOKENS_STARTED tokens of its prompt are another.
START_INLINE = 32
TOKENS_STARTED = 4096
INLINE_CHARS = 16 << 10  # text that is read within the event loop, which takes a few hundredths of a second at most

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A checked request of a client.

    `prompt` is its text, if it came as text. `timeout` bounds the whole request in seconds and `queue_timeout` the time
    until the first token; 0 is no bound. `shown` are special tokens that have text in the answer, even if special
    tokens are skipped, because its reader needs them. `reader` makes the reader of a completion's text, which separates
    content, reasoning and calls. `thinking`, `embeds`, `inserted`, `slo_ttft` and `slo_itl` are as in
    `core.plan.request.Request`. `session` and `keep` too. `heard` is the window of sound that a
    recogniser reads. `adapter` is the one that the client named as its model.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    grammar: Grammar | None = None
    beams: BeamSearchParams | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout: float = 0.0
    queue_timeout: float = 0.0
    shown: frozenset[int] = frozenset()
    reader: Callable[[], AnswerReader] | None = None
    thinking: Thinking | None = None
    embeds: Embeds | None = None
    inserted: tuple[Inserted, ...] = ()
    heard: Heard | None = None
    slo_ttft: float = 0.0
    slo_itl: float = 0.0
    session: str = ""
    keep: float = 0.0
    adapter: UsedAdapter | None = None

    def within(self, *timeouts: float | None) -> GenerationRequest:
        """Return the same request, bounded by the earliest of its own timeout and these; 0 and None are no bounds."""
        return replace(self, timeout=min(filter(None, (self.timeout, *timeouts)), default=0.0))


class Service:
    """The service that runs requests for an API server.

    `on_end` is called with each run that was started, once it has ended, and with the error that ended it early.
    `eos_ids` end a request, beside those of the model and the tokenizer. `beam_run` runs requests with beams. What runs
    in the `background` is preempted for all other requests. `large_starts` lets requests of many completions start one
    after the other, each in several turns of the event loop. With `keeps_apart` requests of unlike owners share no
    cached prefix.
    """

    beam_run: type[Run]

    def __init__(
        self,
        client: Replicas,
        tokenizer: Tokenizer,
        admission: Admission,
        *,
        seed: int = 0,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.client, self.tokenizer, self.admission = client, tokenizer, admission
        self.on_end: Callable[[Run, BaseException | None], None] | None = None
        self.background = self.keeps_apart = False
        self.large_starts = asyncio.Lock()
        self._seed = seed
        self._eos_ids = eos_ids.union(tokenizer.eos_ids)
        self._count = 0

    def facts(self) -> EngineFacts:
        """Return the engine's facts. Raise Unavailable if no engine is there."""
        if (facts := self.client.facts) is None:
            raise Unavailable("the engine is not running yet; try again soon.", retry_after=5)
        return facts

    def limits(self) -> RequestLimits:
        facts = self.facts()
        eos_ids = self._eos_ids.union(facts.eos_ids)
        return RequestLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_ids=eos_ids,
            max_logprobs=facts.max_logprobs,
            embeds_width=facts.embeds_width,
            decoder_start=facts.decoder_start,
            stem=facts.stem,
        )

    def run(self, asked: GenerationRequest) -> Run:
        self._count += 1
        kind = Run if asked.beams is None else self.beam_run
        return kind(self, asked, derive_seed(self._seed, time.time_ns() + self._count))


class Run:
    """One request under way, as an async iterator of the pieces of its completions.

    `arrived` is on the monotonic clock. `trace_parent` holds the headers that say which trace the request is part of.
    `drawn` holds all completions as the engine counts them; once they have ended, `result` has those that `best_of`
    keeps.
    """

    def __init__(self, service: Service, asked: GenerationRequest, seed: int) -> None:
        self.asked = asked
        self.drawn = [CompletionOutput(index) for index in range(asked.params.num_drawn)]
        self.result = RequestOutput(asked.id, asked.prompt, asked.prompt_token_ids, list(self.drawn))
        self._service, self._seed = service, seed
        self._tickets: list[RequestTicket] = []
        self._completions: list[Completion] = []
        self.trace_parent = trace_parent.current()
        self.arrived = now = time.monotonic()
        self._deadline = now + asked.timeout if asked.timeout > 0 else None
        self._first_by = now + asked.queue_timeout if asked.queue_timeout > 0 else None
        self._admitted = self._embedded = 0
        self._owner = ""
        self.drawn_tokens = self.reasoning_tokens = 0
        self.readers = [asked.reader() for _ in self.drawn] if asked.reader is not None else []

    async def __aenter__(self) -> Run:
        """Admit and submit the request. Raise RequestFailed or InvalidRequest if that cannot be."""
        if len(self.drawn) * self._start_work <= START_INLINE // 4:  # several requests may start in one turn
            return await self._start()
        async with self._service.large_starts:
            return await self._start()

    @property
    def _start_work(self) -> int:
        """The work of starting one completion, in units of START_INLINE."""
        return 1 + len(self.asked.prompt_token_ids) // TOKENS_STARTED

    async def _start(self) -> Run:
        service, asked = self._service, self.asked
        requests = make_requests(
            asked.id,
            asked.prompt_token_ids,
            asked.params,
            service.limits(),
            seed=self._seed,
            priority=BACKGROUND if service.background else asked.priority,
            cache_salt=asked.cache_salt,
            embeds=asked.embeds,
            inserted=asked.inserted,
            heard=asked.heard,
        )
        if asked.slo_ttft or asked.slo_itl:
            requests = [replace(each, slo_ttft=asked.slo_ttft, slo_itl=asked.slo_itl) for each in requests]
        if asked.keep:
            requests = [replace(each, session=asked.session, keep=asked.keep) for each in requests]
        if asked.adapter is not None:
            requests = list(map(asked.adapter.of, requests))
        if asked.thinking is not None:
            requests = [replace(request, thinking=asked.thinking) for request in requests]
        if service.keeps_apart:
            requests = list(map(owner.apart, requests))
        self._completions = [
            Completion(request, output, self.result, service.tokenizer, asked.shown)
            for request, output in zip(requests, self.drawn, strict=True)
        ]
        self._owner = owner.current()
        service.admission.admit(requests, service.facts(), self._owner)
        self._admitted = sum(request.cache_tokens for request in requests)
        self._embedded = embedded_bytes(requests)
        try:
            for index, request in enumerate(requests):
                ticket = await service.client.submit(request, asked.grammar, name=asked.id, index=index)
                self._tickets.append(ticket)
                if (index + 1) * self._start_work % START_INLINE < self._start_work:
                    await asyncio.sleep(0)  # give others a turn
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.client.cancel(ticket for ticket in self._tickets if ticket.ended is None)
        for output in self.drawn:
            if not output.finished:
                output.finish_reason = "abort"
        self._service.admission.leave(len(self._completions), self._admitted, self._embedded, self._owner)
        if self._service.on_end is not None:
            self._service.on_end(self, error)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they come. Raise RequestFailed if the request ends otherwise than by itself."""
        going = list(zip(self._tickets, self._completions, strict=True))
        while going:
            await self._wait([ticket for ticket, _ in going])
            for ticket, completion in list(going):
                if completion.output.finished:
                    ticket.inbox.clear()  # what came after a stop string was found
                if ticket.inbox:
                    yield self._take(ticket, completion)
                if ticket.failure is not None:
                    raise ticket.failure
                if completion.output.finished and ticket.ended is not None:
                    completion.output.metrics = ticket.ended.stats
                    going.remove((ticket, completion))
        self.result.keep_best(self.asked.params)

    def pieces(
        self, interval: int | None = None, *, by_token: bool = False, scored: bool = False
    ) -> AsyncIterable[Piece]:
        """Return the pieces as they come, with what their readers find in them. Reading them raises as the run itself.

        interval: the least tokens of a piece, but for a choice's first and last. by_token: each piece has one token.
        scored: none comes before the prompt's logprobs.
        """
        wait = scored and self.asked.params.prompt_logprobs is not None
        whole: AsyncIterable[Piece] = self
        if wait or (interval or 1) > 1:
            whole = held(self, interval or 1, lambda: not wait or self.scored)
        reads = any(not reader.plain for reader in self.readers)
        return self._read(whole, by_token=by_token) if reads or by_token else whole

    async def _read(self, pieces: AsyncIterable[Piece], *, by_token: bool) -> AsyncIterator[Piece]:
        """Yield the pieces with their events. A long text, such as an argument that has just ended, is read in a
        thread."""
        async for whole in pieces:
            for piece in split(whole) if by_token else (whole,):
                reader = self.readers[piece.output.index]
                read = partial(reader.read, piece.text, ended=piece.ended, tokens=piece.lengths)
                before = reader.reasoning_tokens
                events = await off_loop(reader.waiting + len(piece.text), INLINE_CHARS, read)
                self.reasoning_tokens += reader.reasoning_tokens - before
                yield piece._replace(read=events)

    async def finish(self) -> RequestOutput:
        """Run the request to its end and return the whole result."""
        async for _ in self:
            pass
        return self.result

    def abort(self) -> None:
        """End the request from elsewhere. Its iterator gets `Aborted`, and the result is what was written so
        far."""
        for ticket in self._tickets:
            ticket.fail(Aborted("the request was aborted by another call."))

    @property
    def entries(self) -> int:
        """About how many entries the whole answer has: the tokens of prompt and outputs, each as often as logprobs list
        others beside it."""
        params = self.asked.params
        prompt = len(self.asked.prompt_token_ids) * (1 + (params.prompt_logprobs or 0)) * params.n
        return prompt + self.drawn_tokens * (1 + (params.num_logprobs or 0))

    def entries_of(self, piece: Piece) -> int:
        """Return about how many entries a piece has, likewise."""
        return len(piece.token_ids) * (1 + (self.asked.params.num_logprobs or 0))

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """Do some work on the run, and return its result. It is done in a thread if its size, in entries, is large."""
        with self.working():
            return await off_loop(size, INLINE_ENTRIES, work)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Say that the server itself is busy with the request: its reader is not to blame for what waits meanwhile."""
        for ticket in self._tickets:
            ticket.busy = True
        try:
            yield
        finally:
            for ticket in self._tickets:
                ticket.busy = False

    @property
    def usage(self) -> Usage:
        return Usage(len(self.asked.prompt_token_ids), self.drawn_tokens, self.cached_tokens, self.reasoning_tokens)

    @property
    def endings(self) -> list[Ended | None]:
        """The engine's report on the end of each drawn completion; None for one that has not ended."""
        told = [ticket.ended for ticket in self._tickets]
        return told + [None] * (len(self.drawn) - len(told))

    def place(self, output: CompletionOutput) -> int:
        """Return the completion's position among those drawn. Its index is the position among those kept."""
        return next(place for place, each in enumerate(self.drawn) if each is output)

    @property
    def scored(self) -> bool:
        """True once the prompt's logprobs that were asked for are there."""
        length, start = len(self.asked.prompt_token_ids), self.asked.params.scored_from
        return start is None or start >= length or len(self.result.prompt_logprobs or ()) == length

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the first completion found in the prefix cache."""
        first = self._tickets[0].ended if self._tickets else None
        return first.stats.cached_tokens if first is not None else 0

    async def _wait(self, tickets: list[RequestTicket]) -> None:
        """Wait until one of the tickets has something to read. Raise TimedOut if that takes too long."""
        waiter = asyncio.get_running_loop().create_future()
        for ticket in tickets:
            ticket.watch(waiter)
        deadline = min((by for by in (self._deadline, self._first_by) if by is not None), default=None)
        if deadline is None:
            await waiter
            return
        now = time.monotonic()
        try:
            if self._deadline is not None and now > self._deadline and any(ticket.ended is None for ticket in tickets):
                raise TimeoutError  # even where there is always something to read
            async with asyncio.timeout(deadline - now):
                await waiter
        except TimeoutError:
            if deadline == self._first_by:
                waited = f"no token came within {self.asked.queue_timeout:g} s"
                raise TimedOut(f"{waited}, so the request was ended; try again later.") from None
            raise TimedOut(f"the request took longer than {self.asked.timeout:g} s and was ended.") from None

    def _take(self, ticket: RequestTicket, completion: Completion) -> Piece:
        """Return everything that has come for a completion as one piece."""
        text, before, inbox = list[str](), len(completion.output.token_ids), ticket.inbox
        while inbox and not completion.output.finished:
            item = inbox.popleft()
            if isinstance(item, int):
                text.append(completion.take_token(item))
            else:
                text.append(self._take_event(item, completion))
        inbox.clear()
        if completion.output.finish_reason == "error":
            raise EngineFailed(completion.output.error or "the request ended with an error.")
        new = completion.output.token_ids[before:]
        self.drawn_tokens += len(new)
        if new:
            self._first_by = None
        if completion.abort_at is not None:
            self._service.client.cancel([ticket], completion.abort_at)
        output = completion.output
        return Piece("".join(text), new, output, list(map(len, text[: len(new)])), output.finished)

    def _take_event(self, event: Event, completion: Completion) -> str:
        if event.finish_reason == "error":
            raise self._failure(event.error or "the engine ended this request with an error.")
        return completion.take(
            TokenEvent(
                completion.request.id,
                event.token_id,
                event.finish_reason,
                event.logprobs,
                event.prompt_logprobs,
                event.error,
                event.array,
            )
        )

    def _failure(self, error: str) -> RequestFailed:
        """Return the failure for an error of the engine. A token mask is made of what the client sent, so its failure
        is the client's mistake."""
        if not error.startswith(MASK_FAILED):
            return EngineFailed(error)
        if self.asked.grammar is not None:
            return BadRequest(error.removeprefix(MASK_FAILED + ": "), param="structured_outputs")
        param = "bad_words" if self.asked.params.allowed_token_ids is None else "allowed_token_ids"
        return BadRequest("allowed_token_ids and bad_words leave no token to choose from; loosen them.", param=param)
