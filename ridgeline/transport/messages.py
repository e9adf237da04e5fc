"""The messages between API servers and the engine, as msgspec structs: msgpack arrays with a tag in front.

Requests have numbers here, which each API server counts up; the engine tells API servers apart by their connections.
Times are on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Literal, get_type_hints

import msgspec
import numpy as np

from ridgeline.core.plan.cache_figures import CacheFigures
from ridgeline.core.plan.embeds import Embeds, Inserted
from ridgeline.core.plan.octets import octets_received, plain_octets
from ridgeline.core.plan.request import (
    MAX_LOGPROBS,
    PromptLogprobs,
    RequestStats,
    SamplingParams,
    Thinking,
    TokenLogprobs,
)
from ridgeline.core.plan.sleep import Kind
from ridgeline.core.plan.sounds import SpeechRules, Waveform
from ridgeline.core.specs.pooling import PoolingSpec, Task
from ridgeline.core.specs.stem import SoundStem
from ridgeline.kernels.base.cost import Headroom


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The base of all messages. They are encoded without field names, so both ends must be of one version. They are one
    installation."""


def _received(params: SamplingParams) -> None:
    object.__setattr__(params, "__class__", SamplingParams)


# SamplingParams as the engine's process decodes them: of the right types, and not checked again, because the API server
# has done that. To check 100,000 allowed ids takes as long as some steps.
_hints = get_type_hints(SamplingParams)
_fields = [
    (each.name, _hints[each.name], dataclasses.field(default=each.default, default_factory=each.default_factory))
    for each in fields(SamplingParams)
]
if TYPE_CHECKING:
    Checked = SamplingParams
else:
    Checked = dataclasses.make_dataclass("Checked", _fields, namespace={"__post_init__": _received}, frozen=True)


# ---- from an API server ---------------------------------------------------------------------------------------------


class Grammar(Message, frozen=True):
    """The form that the output must have. With kind "json" the text is a JSON schema, or "" for any object. With
    "quoted" it is a grammar of the text of a string of JSON, which a check puts into one of the string."""

    kind: Literal["json", "regex", "grammar", "quoted"]
    text: str


class Hello(Message, frozen=True, tag="hello"):
    """An API server's first message, repeated until it is answered. `name` is one that no other ever had here."""

    name: str


# Fields that `Submit` and `core.plan.request.Request` both have as they are.
AS_THEY_ARE = (
    *("params", "seed", "max_total_tokens", "cache_salt", "priority", "arrival", "task", "whole", "second_text"),
    *("thinking", "embeds", "encoder_ids", "sound", "speech", "slo_ttft", "slo_itl", "adapter", "prefix_keys"),
    *("session", "keep", "inserted"),
)


class Submit(Message, frozen=True, tag="submit"):
    """One completion to run, with fields as in `core.plan.request.Request`.

    `name` is the request's name at its client, of which this is completion `index`. `owner` is the client by its key,
    or else by its address.
    """

    id: int
    name: str
    index: int
    prompt_token_ids: list[int]
    params: Checked
    seed: int
    max_total_tokens: int
    stop_ids: list[int]
    eos_ids: list[int]
    cache_salt: str
    priority: int
    arrival: float
    grammar: Grammar | None = None
    owner: str = ""
    task: Task | None = None
    whole: bool = False
    second_text: int = 0
    thinking: Thinking | None = None
    embeds: Embeds | None = None
    encoder_ids: tuple[int, ...] = ()
    sound: Waveform | None = None
    speech: SpeechRules | None = None
    slo_ttft: float = 0.0
    slo_itl: float = 0.0
    adapter: int = 0
    prefix_keys: tuple[str, ...] = ()
    session: str = ""
    keep: float = 0.0
    inserted: tuple[Inserted, ...] = ()


class Cancel(Message, frozen=True, tag="cancel"):
    """The order to end requests. `at_token` is the number of output tokens to keep if a stop string was found."""

    ids: list[int]
    at_token: int | None = None


class Ask(Message, frozen=True, tag="ask"):
    """The question for a `Stats` now."""


class Forget(Message, frozen=True, tag="forget"):
    """The order to let no later request find anything in the prefix cache. A `Forgot` follows."""


class Count(Message, frozen=True, tag="count"):
    """The question for the figures of the cache. A `CacheCounted` follows."""


Mode = Literal["abort", "wait", "keep"]


class Pause(Message, frozen=True, tag="pause"):
    """The order to begin no further step. A `Standing` follows as soon as none runs.

    Requests that are here go on afterwards ("keep"), end now ("abort"), or run to their end first ("wait"). Those that
    come later wait for a `Resume`.
    """

    mode: Mode


class Sleep(Pause, frozen=True, tag="sleep"):
    """A `Pause` in which the device's memory goes back. Level 1 keeps weights in the host's memory, level 2 nothing."""

    level: Literal[1, 2] = 1


class Reload(Pause, frozen=True, tag="reload"):
    """A `Pause` in which the weights are read again, from this folder or, without one, from where they came. If the
    engine was not paused before, it goes on then."""

    path: str = ""


class MeetTrainer(Pause, frozen=True, tag="meet trainer"):
    """A `Pause` in which the engine's ranks join a trainer's group, as `core.plan.transfer.Meeting`. If the engine was
    not paused before, it goes on then. buffer_bytes: of packs that then come (0: tensors come one by one)."""

    address: str
    port: int
    rank: int
    size: int
    limit: float
    buffer_bytes: int


class BeginWeights(Pause, frozen=True, tag="begin weights"):
    """A `Pause` that lasts until an `EndWeights`, for new weights to come."""


class TakeWeights(Pause, frozen=True, tag="take weights"):
    """A `Pause` in which tensors come from the trainer, as `core.plan.transfer.Announced`. buffer_bytes: None: as the
    `MeetTrainer` said."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    buffer_bytes: int | None = None


class EndWeights(Pause, frozen=True, tag="end weights"):
    """The end of a `BeginWeights`: later steps have the new weights. If the engine was not paused before, it goes on.
    version: their name (empty: a number that counts up)."""

    version: str = ""


class Wake(Message, frozen=True, tag="wake"):
    """The order to bring memory of these kinds back and, if all is there then, to go on. A `Standing` follows."""

    kinds: list[Kind]


class Resume(Message, frozen=True, tag="resume"):
    """The order to go on after a `Pause`. A `Standing` follows."""


class Look(Message, frozen=True, tag="look"):
    """The question for a `Seen` now, about the request with this name or the newest ones."""

    name: str | None = None
    limit: int = 1


class LoadAdapter(Message, frozen=True, tag="load adapter"):
    """The order to load the adapter in a folder. An `AdapterAnswer` follows.

    `number` is one that no other adapter ever had, and alike for all engines. `replaces`: if there is one of this name,
    the new one takes its place. `id` names the order in its answer.
    """

    id: int
    name: str
    number: int
    folder: str
    replaces: bool = False


class UnloadAdapter(Message, frozen=True, tag="unload adapter"):
    """The order to take no further requests with an adapter, and to forget it once those that are here have ended. An
    `AdapterAnswer` follows. `number`: only if the name stands for this one; 0: for any. `id` names the order in its
    answer."""

    id: int
    name: str
    number: int = 0


AdapterOrder = LoadAdapter | UnloadAdapter


# ---- from the engine ------------------------------------------------------------------------------------------------


class ServedAdapter(Message, frozen=True):
    """An adapter that the engine has loaded. `number` and `key` are what a request needs, `folder` is where it lies,
    `parent` the name of its model, and `num_bytes` what its matrices take."""

    name: str
    number: int
    key: str
    folder: str
    parent: str
    num_bytes: int = 0


class AdapterAnswer(Message, frozen=True, tag="adapter answer"):
    """The answer to a `LoadAdapter` or an `UnloadAdapter`, which comes once every API server was told the new list.
    `error` says why an order was not obeyed; `unknown`: because the engine has no such adapter. `id` is the order's."""

    id: int
    error: str = ""
    unknown: bool = False


class EngineFacts(Message, frozen=True):
    """The facts about the model and the engine that an API server must know.

    `life` is 1 for the first engine of a server and one more for each that replaced another. `cache_tokens` is the
    number of tokens that one request may have in the KV cache, and `kv_cache_tokens` that of all requests together.
    `session_ttl` is the most seconds for which a session is kept.
    `pooling` is there for a model that pools. `encodes` is the most tokens of an encoder input (0: the model has no
    encoder), and `decoder_start` the tokens that outputs then follow. `stem` says which sounds it reads.
    `architecture`, `parameters`, `layers`, `width` and `precision` describe the network, and `weight_bytes` is what its
    weights take on the first rank's device.
    `ranks` divide the model. `weight_version` changes when a trainer has sent other weights.
    `modalities` are the kinds of media that the network takes: image, audio. `media_widths` are the numbers of a vector
    of a picture and of a sound, if these may come as vectors; 0: they may not.
    """

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
    session_ttl: float = inf
    life: int = 1
    cache_dtype: str = ""  # of keys and values, where that is another than dtype
    max_logprobs: int = MAX_LOGPROBS
    embeds_width: int = 0
    gpu_memory_utilization: float = 0.0
    kv_cache_memory_bytes: int = 0
    kv_cache_tokens: int = 0
    pooling: PoolingSpec | None = None
    encodes: int = 0
    decoder_start: tuple[int, ...] = ()
    stem: SoundStem | None = None
    architecture: str = ""
    parameters: int = 0
    layers: int = 0
    width: int = 0
    precision: str = ""
    weight_bytes: int = 0
    adapters: list[ServedAdapter] = []
    ranks: int = 1
    weight_version: str = ""
    modalities: tuple[str, ...] = ()
    media_widths: tuple[int, int] = (0, 0)


class Welcome(Message, frozen=True, tag="welcome"):
    facts: EngineFacts


class Event(Message, frozen=True):
    """A token's event, as `core.plan.request.TokenEvent`. `vector` is its bytes, float32, and `tokens` says how many
    vectors these are: 0 for the one of the prompt."""

    id: int
    token_id: int
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    vector: bytes | None = None
    tokens: int = 0

    @property
    def array(self) -> np.ndarray | None:
        """The vector as `TokenEvent` has it."""
        if self.vector is None:
            return None
        found = np.frombuffer(self.vector, np.float32)
        return found.reshape(self.tokens, -1) if self.tokens else found


class Ended(Message, frozen=True):
    """The end of a request and where its time went. `device` holds the seconds that the device worked meanwhile, and
    the least it had needed."""

    id: int
    stats: RequestStats
    device: Headroom


class Life(Message, frozen=True):
    """A completion, ended or not. While it runs, `finish_reason` is None and the figures are those so far. `created` is
    in seconds since 1970."""

    name: str
    index: int
    created: float
    finish_reason: str | None
    stats: RequestStats
    device: Headroom


class Forgot(Message, frozen=True, tag="forgot"):
    """The answer to a `Forget`."""


class CacheCounted(Message, frozen=True, tag="counted"):
    """The answer to a `Count`: the figures of each cache that the engine has."""

    caches: list[CacheFigures]


class Seen(Message, frozen=True, tag="seen"):
    """The answer to a `Look`; answers come in the order of the questions. `lives` has the newest request first."""

    lives: list[Life]


class Standing(Message, frozen=True, tag="standing"):
    """The answer to a `Pause`, a `Wake` or a `Resume`; answers come in the order of the orders. `asleep` is the level,
    and 0 for an engine that is awake. `error` says why an order was not obeyed."""

    paused: bool
    asleep: int = 0
    error: str = ""


class Begun(Message, frozen=True, tag="begun"):
    """An API server's requests that the next step runs for the first time, told before it begins."""

    ids: list[int]


class Progress(Message, frozen=True, tag="progress"):
    """The outcome of one step for an API server's requests. Most got a token and nothing else; these stand side by side
    in `ids` and `token_ids`."""

    ids: list[int]
    token_ids: list[int]
    events: list[Event]
    ended: list[Ended]


class Refused(Message, frozen=True, tag="refused"):
    """A request that will not run. `param` is its field at fault, if one is. `retry_after` is in seconds, if the server
    has no time for the request now; with `param`, if that objective cannot be met now.
    `paused` is true if the request ended because the engine was paused."""

    id: int
    error: str
    param: str | None = None
    retry_after: int | None = None
    paused: bool = False


class Distribution(Message, frozen=True):
    """A histogram: the number of values up to each bound, then those above all bounds, and the sum of all values."""

    counts: list[int]
    total: float


class StepFigures(Message, frozen=True):
    """One step, for the timeline: when it was collected, how long it took, the least it could have taken, and its
    rows."""

    at: float
    seconds: float
    limit: float
    decode_rows: int
    prefill_rows: int
    tokens: int


class Gpu(Message, frozen=True):
    """A GPU's figures by NVML. Memory is in bytes, power in watts, utilization 0 … 1; None is unknown."""

    index: int
    name: str
    utilization: float | None
    memory_used: int
    memory_total: int
    power: float | None
    temperature: float | None


class ExpertFigures(Message, frozen=True):
    """The load of a mixture's experts, as `core.plan.expert_load.ExpertLoad`. `tokens` are its totals as bytes, int64,
    row by row. `reached` is how many experts of each layer had tokens in one recent step."""

    layers: list[int]
    experts: list[int]
    tokens: bytes
    reached: list[int]


class RankFigures(Message, frozen=True):
    """`core.plan.rank_waits.RankWaits`."""

    rank: int
    waited: float
    caused: float
    share: float


class Stats(Message, frozen=True, tag="stats"):
    """The engine's figures: gauges as they are now, counters and histograms since the engine started.

    `EngineStats` has their names and bounds. `recent` holds the newest steps, some of which earlier messages held too.
    `started` is in seconds since 1970.
    """

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
    experts: ExpertFigures | None = None
    saturations: int = 0
    ranks: list[RankFigures] = []
    paused: bool = False
    asleep: int = 0


WeightOrder = MeetTrainer | BeginWeights | TakeWeights | EndWeights
Order = Pause | Sleep | Reload | Wake | Resume | WeightOrder
FromFace = Hello | Submit | Cancel | Ask | Look | Forget | Count | Order | AdapterOrder
FromEngine = Welcome | Begun | Progress | Refused | Stats | Seen | Forgot | CacheCounted | Standing | AdapterAnswer

encode = msgspec.msgpack.Encoder(enc_hook=plain_octets).encode
decode_from_face = msgspec.msgpack.Decoder(FromFace, dec_hook=octets_received).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
