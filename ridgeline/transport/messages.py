"""Everything that API servers and the engine say to each other, as msgspec structs: msgpack arrays with a tag in front.

Requests have numbers on the wire, counted up by each API server; the engine tells API servers apart by their
connections. Times are on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.core.cost import Headroom
from ridgeline.core.request import RequestStats, SamplingParams, TokenLogprobs


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all: encoded without field names, so both ends must be of one version (they are one installation)."""


# ---- from an API server ---------------------------------------------------------------------------------------------


class Grammar(Message, frozen=True):
    """What the output must be. kind "json": text is a JSON schema, "" for any object."""

    kind: Literal["json", "regex", "grammar"]
    text: str


class Hello(Message, frozen=True, tag="hello"):
    """An API server's first word, repeated until it is answered. name: one that no other ever had here."""

    name: str


class Submit(Message, frozen=True, tag="submit"):
    """One completion to run; fields as of `core.request.Request`. name: what its client knows the request by, of
    which this is completion `index`. owner: the client, as far as the API server can tell it from others."""

    id: int
    name: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    stop_ids: list[int]
    eos_ids: list[int]
    cache_salt: str
    priority: int
    arrival: float
    grammar: Grammar | None = None
    owner: str = ""


class Cancel(Message, frozen=True, tag="cancel"):
    """End requests. at_token: output tokens to keep where a stop string was found in one of them."""

    ids: list[int]
    at_token: int | None = None


class Ask(Message, frozen=True, tag="ask"):
    """Wants a `Stats` now."""


class Look(Message, frozen=True, tag="look"):
    """Wants a `Seen` now: of the request with this name, or of the newest ones."""

    name: str | None = None
    limit: int = 1


# ---- from the engine ------------------------------------------------------------------------------------------------


class EngineFacts(Message, frozen=True):
    """What an API server must know of the model and the engine. life: 1 for the first engine of a server, one more for
    each that replaced another. cache_tokens: that one request may have in the KV cache."""

    process_id: int
    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_pages: int
    cache_tokens: int
    dtype: str
    device: str
    enable_prefix_caching: bool
    life: int = 1


class Welcome(Message, frozen=True, tag="welcome"):
    facts: EngineFacts


class Event(Message, frozen=True):
    """As `core.request.TokenEvent`."""

    id: int
    token_id: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class Ended(Message, frozen=True):
    """Where a finished request's time went. device: seconds that the device worked meanwhile, and what it had needed
    at the least."""

    id: int
    stats: RequestStats
    device: Headroom


class Life(Message, frozen=True):
    """A completion, ended or not: `finish_reason` is None while it runs, and the figures are those so far. created:
    seconds since 1970."""

    name: str
    index: int
    created: float
    finish_reason: str | None
    stats: RequestStats
    device: Headroom


class Seen(Message, frozen=True, tag="seen"):
    """Answers `Look`s, in their order. lives: of the newest request first."""

    lives: list[Life]


class Progress(Message, frozen=True, tag="progress"):
    """What one step gave an API server's requests: most got a token and nothing else, side by side in ids and
    token_ids."""

    ids: list[int]
    token_ids: list[int]
    events: list[Event]
    ended: list[Ended]


class Refused(Message, frozen=True, tag="refused"):
    """A request that will not run. param: of the request, where one is to blame. retry_after: seconds, where it is
    the server that has no time for it."""

    id: int
    error: str
    param: str | None = None
    retry_after: int | None = None


class Distribution(Message, frozen=True):
    """A histogram: how many values fell up to each bound (and, last, beyond all of them), and their sum."""

    counts: list[int]
    total: float


class StepFigures(Message, frozen=True):
    """One step, for the timeline: when it was collected, how long it took, the least it could have, and its rows."""

    at: float
    seconds: float
    limit: float
    decode_rows: int
    prefill_rows: int
    tokens: int


class Gpu(Message, frozen=True):
    """By NVML. memory in bytes, power in watts, utilization 0 … 1; None: not told."""

    index: int
    name: str
    utilization: float | None
    memory_used: int
    memory_total: int
    power: float | None
    temperature: float | None


class Stats(Message, frozen=True, tag="stats"):
    """Gauges as they are now, counters and histograms since the engine started (`EngineStats` has their names and
    bounds). recent: the newest steps, of which earlier messages told too. started: seconds since 1970."""

    at: float
    started: float
    running: int
    waiting: int
    pages_used: int
    num_pages: int
    steps: int
    step_seconds: float
    limit_seconds: float
    counters: dict[str, float]
    finished: dict[str, int]
    histograms: dict[str, Distribution]
    recent: list[StepFigures]
    gpus: list[Gpu]


FromFace = Hello | Submit | Cancel | Ask | Look
FromEngine = Welcome | Progress | Refused | Stats | Seen

encode = msgspec.msgpack.Encoder().encode
decode_from_face = msgspec.msgpack.Decoder(FromFace).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
