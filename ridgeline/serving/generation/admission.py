"""Admission of requests. None is admitted while the server ends, none beyond the queue's bounds, and none that the
cache could never hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.plan.request import Request
from ridgeline.serving.errors import BadRequest, Overloaded, TooLong, Unavailable
from ridgeline.serving.owner import trusted
from ridgeline.transport.messages import EngineFacts

RETRY_AFTER = 1  # seconds
SPARE = 8  # 1/8 of a bound is for owners that have less than that open, beyond what others may fill
MOST_EMBEDDED = 1 << 30  # bytes of open requests' prompts that came as vectors


@dataclass
class Admission:
    """The bounds on requests that are open at once, running or waiting.

    `max_requests` and `max_tokens` are the bounds of this API server (0: no bound); of N API servers each gets its
    share. An owner that has little open gets in a little beyond them, so that no other can fill the queue.
    `priority_floor` is the most urgent priority that keys which are not trusted may give (None: any). `open_bytes` are
    those of prompts that came as vectors, and of sounds, which the queue's tokens do not bound. `rejected_requests` and
    `rejected_tokens` count what these bounds turned away. The tokens of a request are its prompt and all that it may
    write, counted twice where it is guided.
    """

    max_requests: int = 0
    max_tokens: int = 0
    priority_floor: int | None = None
    draining: bool = False
    open_requests: int = 0
    open_tokens: int = 0
    open_bytes: int = 0
    rejected_requests: int = 0
    rejected_tokens: int = 0
    requests_of: Counter[str] = field(default_factory=Counter)  # by owner
    tokens_of: Counter[str] = field(default_factory=Counter)
    bytes_of: Counter[str] = field(default_factory=Counter)

    def admit(self, requests: Sequence[Request], facts: EngineFacts, owner: str = "") -> None:
        """Count these requests of an owner in until `leave` is called for them.

        Raise Unavailable while the server ends, Overloaded if the queue is full, and BadRequest if they could never
        run or are more urgent than the key allows.
        """
        if self.draining:
            raise Unavailable("the server is shutting down; send the request to another.", retry_after=5)
        self._check_priority(min(request.priority for request in requests))
        tokens = sum(request.cache_tokens for request in requests)
        for request in requests:
            if request.cache_tokens > facts.cache_tokens:
                guided = ", of both prompts," if request.params.guidance_scale != 1 else ""
                raise TooLong(
                    f"prompt and max_tokens together{guided} are {request.cache_tokens} tokens, and the KV cache holds "
                    f"{facts.cache_tokens}; lower max_tokens.",
                    param="max_tokens",
                )
        self._check_alone(requests, tokens)
        most = _bound(self.max_requests, self.requests_of[owner] + len(requests))
        if self.max_requests and self.open_requests + len(requests) > most:
            self.rejected_requests += 1
            raise Overloaded(
                f"{self.open_requests} requests are open, of at most {self.max_requests}; try again later.",
                retry_after=RETRY_AFTER,
            )
        most = _bound(self.max_tokens, self.tokens_of[owner] + tokens)
        if self.max_tokens and self.open_tokens + tokens > most:
            self.rejected_tokens += 1
            raise Overloaded(
                f"the open requests have {self.open_tokens} tokens and this one {tokens}, of at most "
                f"{self.max_tokens}; try again later.",
                retry_after=RETRY_AFTER,
            )
        size = embedded_bytes(requests)
        most = _bound(MOST_EMBEDDED, self.bytes_of[owner] + size)
        if size and self.open_bytes + size > most:
            self.rejected_tokens += 1
            raise Overloaded(
                f"the open requests have {self.open_bytes} bytes of vectors, pictures and sounds and this one {size}, "
                f"of at most {MOST_EMBEDDED}; try again later.",
                retry_after=RETRY_AFTER,
            )
        self._count(owner, len(requests), tokens, size)

    def _check_priority(self, priority: int) -> None:
        least = self.priority_floor
        if least is not None and priority < least and not trusted():
            raise BadRequest(
                f"priority is {priority}, and this key may ask for {least} or above; give such a one, or leave it out.",
                param="priority",
            )

    def _check_alone(self, requests: Sequence[Request], tokens: int) -> None:
        """Raise if these requests would be too much even for an idle server, where trying again is no help."""
        count = len(requests)
        name = "n" if requests[0].params.best_of is None else "best_of"
        if 0 < self.max_requests < count:
            raise BadRequest(
                f"{name} is {count}, and at most {self.max_requests} completions may be open at once; lower {name}.",
                param=name,
            )
        if 0 < self.max_tokens < tokens:
            raise TooLong(
                f"prompt and max_tokens, times {name}, are {tokens} tokens, and at most {self.max_tokens} may be open "
                "at once; lower max_tokens.",
                param="max_tokens",
            )

    def leave(self, count: int, tokens: int, size: int = 0, owner: str = "") -> None:
        self._count(owner, -count, -tokens, -size)
        if self.requests_of[owner] <= 0:
            del self.requests_of[owner], self.tokens_of[owner], self.bytes_of[owner]

    def _count(self, owner: str, requests: int, tokens: int, size: int) -> None:
        self.open_requests += requests
        self.open_tokens += tokens
        self.open_bytes += size
        self.requests_of[owner] += requests
        self.tokens_of[owner] += tokens
        self.bytes_of[owner] += size


def _bound(most: int, own: int) -> int:
    """Return the most that may be open, if an owner then has so much of it."""
    spare = most // SPARE
    return most + spare if own <= spare else most


def embedded_bytes(requests: Sequence[Request]) -> int:
    """Return the bytes of prompts that came as vectors, and of pictures and sounds."""
    return sum(map(inserted_bytes, requests))


def inserted_bytes(request: Request) -> int:
    """Return the bytes of a request's vectors, pictures and sounds, without those of shared memory, which has bounds of
    its own."""
    shown = {id(own): own.sent_bytes for each in request.inserted if (own := each.made_of) is not None}
    given = sum(len(each.embeds.data) for each in request.inserted if each.embeds is not None)
    heard = 0 if request.sound is None else request.sound.samples.sent_bytes
    return sum(shown.values()) + given + heard + (0 if request.embeds is None else len(request.embeds.data))
