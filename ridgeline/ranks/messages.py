"""The messages between the leader and its ranks, as msgpack with a tag in front. Both ends run the same installation.

Arrays travel as their dtype, shape and bytes. The rows of a plan are sent once for all plans that share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.core.plan.octets import octets_received, plain_octets
from ridgeline.core.plan.step import (
    Assign,
    CopyBlocks,
    Delta,
    Guided,
    MaskedDrafts,
    Moves,
    PlacedAdapter,
    PrefixGroup,
    Release,
    Rows,
    SetBlocks,
    Span,
    StepPlan,
    StepResult,
)
from ridgeline.core.plan.transfer import Announced, Meeting


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of all messages."""


# ---- from the leader ------------------------------------------------------------------------------------------------


class Begin(Message, frozen=True, tag="begin"):
    """The first message: which rank this is, where ranks meet, and what to assemble.

    options: arguments of `LLMConfig`. limit: seconds after which a collective gives up. speaks: the leader wants all
        of the rank's results, and not their outlines.
    """

    rank: int
    size: int
    meeting: str
    limit: float
    options: dict[str, Any]
    speaks: bool = True


class Assigned(Message, frozen=True, tag="assign"):
    delta: Assign


class BlocksSet(Message, frozen=True, tag="blocks"):
    delta: SetBlocks


class Released(Message, frozen=True, tag="release"):
    delta: Release


class SentRows(Message, frozen=True):
    """`core.plan.step.Rows`, with features as a number."""

    slots: np.ndarray
    generations: np.ndarray
    kinds: np.ndarray
    num_tokens: np.ndarray
    num_logits: np.ndarray
    tokens_each: int
    features: int
    num_logprobs: int
    prefixes: tuple[PrefixGroup, ...]
    guided: tuple[Guided, ...]
    marks: np.ndarray | None


class SentPlan(Message, frozen=True, tag="plan"):
    """`core.plan.step.StepPlan`. rows: None means those of the plan before that was the same part of its step."""

    id: int
    part: int
    rows: SentRows | None
    kv_bound: np.ndarray
    spans: tuple[Span, ...]
    deltas: tuple[Assigned | BlocksSet | Released, ...]
    copies: tuple[CopyBlocks, ...]
    reset: bool
    expected: dict[int, Assign] | None
    after: int
    drafts: bool
    moves: Moves | None
    adapters: tuple[PlacedAdapter, ...] = ()
    forgets: tuple[str, ...] = ()


class Round(Message, frozen=True, tag="round"):
    """The step of a rank that has tokens of its own.

    plan: None if it only lends its experts.
    rows, tokens: the most that a rank has in this step. each: 1 if every row of all ranks runs one token, else 0.
    captured: False if some rank's plan needs to run op by op; then all do.
    """

    rows: int
    tokens: int
    each: int
    captured: bool
    plan: SentPlan | None


class SentMasks(Message, frozen=True, tag="masks"):
    plan_id: int
    masks: dict[int, np.ndarray]
    drafts: dict[int, MaskedDrafts] | None


class Ask(Message, frozen=True, tag="ask"):
    """A question: the name of one of the worker's methods without arguments, whose result is the answer."""

    method: str


class Watch(Message, frozen=True, tag="watch"):
    """Look at the experts' tallies with every plan from now on, or no longer."""

    on: bool


class Look(Message, frozen=True, tag="look"):
    """Look at the experts' tallies with the next plan."""


class Move(Message, frozen=True, tag="move"):
    """Experts of a mixture change places before the next step. takes: slots, and for each the slot whose expert it
    takes, all of them at once. Slot s of rank r has the number r · slots + s."""

    mixture: int
    takes: tuple[tuple[int, int], ...]


class MoveBelow(Message, frozen=True, tag="below"):
    """Move blocks to the host's memory and from it, behind plans up to this one, which are done."""

    plan: int
    moves: Moves


class Settle(Message, frozen=True, tag="settle"):
    """All plans up to this one are done, and none follows for now: stages of a pipeline take in their tokens."""

    plan_id: int


class AddAdapter(Message, frozen=True, tag="add"):
    """Read an adapter, and know it by this number. The answer is an `AdapterRead`."""

    number: int
    folder: str


class RemoveAdapter(Message, frozen=True, tag="remove"):
    """Forget an adapter with which no request runs."""

    number: int


class MeetTrainer(Message, frozen=True, tag="meet"):
    """Join the group of a trainer that sends weights. A `Followed` is the answer."""

    meeting: Meeting


class TakeWeights(Message, frozen=True, tag="weights"):
    """Receive weights from the trainer. A `Followed` is the answer."""

    announced: Announced


class Stop(Message, frozen=True, tag="stop"):
    """Finish what was submitted, and end."""


# ---- from a rank ----------------------------------------------------------------------------------------------------


class Loading(Message, frozen=True, tag="loading"):
    """The progress of loading."""

    what: str
    fraction: float


class Ready(Message, frozen=True, tag="ready"):
    """The rank works from now on. The facts are the same on every rank, but for the bytes of its memory, and for
    device_name and captured where stages have unlike devices.

    kv_cache: bytes. num_pages: of the smallest cache of all ranks. why: the reason for the dtype.
    fingerprint: of the files of the model, and of what drafts for it, before the rank read them (`weights.folder`).
    below_bytes: of layers that wait in the host's memory. copying: seconds in which they come.
    """

    dtype: str
    why: str
    device_name: str
    weights: int
    activations: int
    kv_cache: int
    num_pages: int
    block_size: int
    max_model_len: int
    max_seqs: int
    max_tokens: int
    cascade: bool
    captured: bool
    fingerprint: str = ""
    below_bytes: int = 0
    copying: float = 0.0


class Mistake(Message, frozen=True, tag="mistake"):
    """The rank cannot begin, or cannot read an adapter. kind: the name of an error in `core.errors`, or "" for any
    other."""

    kind: str
    sentence: str


class Alive(Message, frozen=True, tag="alive"):
    """The rank's process runs."""


class Done(Message, frozen=True, tag="done"):
    """A plan's outcome: from the rank that speaks for all the whole of it, from others whether it failed. settled: the
    newest plan up to which the rank's copies to and from shared memory have ended."""

    result: StepResult
    settled: int = 0


class Answer(Message, frozen=True, tag="answer"):
    """The answer to an `Ask`: msgpack, of the type that the question has. error: the device is lost."""

    value: bytes
    error: str | None = None


class Followed(Message, frozen=True, tag="followed"):
    """The answer to an order. mistake: the reason why it was not obeyed."""

    mistake: Mistake | None = None


class AdapterRead(Message, frozen=True, tag="adapter"):
    """The outcome of an `AddAdapter`: the facts of the rank's share of the adapter, or the reason why it has none."""

    facts: AdapterFacts | None
    mistake: Mistake | None = None


FromLeader = (
    Begin
    | SentPlan
    | Round
    | SentMasks
    | Ask
    | Watch
    | Look
    | Move
    | MoveBelow
    | Settle
    | AddAdapter
    | RemoveAdapter
    | MeetTrainer
    | TakeWeights
    | Stop
)
FromRank = Loading | Ready | Mistake | Alive | Done | Answer | AdapterRead | Followed


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    return plain_octets(value)


def _array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    return octets_received(kind, value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader, dec_hook=_array).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=_array).decode


def decode_as(kind: Any, value: bytes) -> Any:
    """Return an answer of this type."""
    return msgspec.msgpack.decode(value, type=kind, dec_hook=_array)


class PlanSender:
    """Turns plans into messages, and remembers whose rows were sent."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}  # by part of a step

    def message(self, plan: StepPlan, part: int = 0) -> SentPlan:
        rows = None if plan.rows is self._rows.get(part) else _sent_rows(plan.rows)
        self._rows[part] = plan.rows
        expected = None if plan.expected is None else dict(plan.expected)
        deltas = tuple(map(_sent_delta, plan.deltas))
        whole = plan.kv_bound_R, plan.spans, deltas, plan.copies, plan.reset, expected, plan.after, plan.drafts
        return SentPlan(plan.id, part, rows, *whole, plan.moves, plan.adapters, plan.forgets)


class PlanReceiver:
    """Turns messages back into plans."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}  # by part of a step

    def plan(self, sent: SentPlan) -> StepPlan:
        if sent.rows is not None:
            self._rows[sent.part] = _rows(sent.rows)
        return StepPlan(
            id=sent.id,
            rows=self._rows[sent.part],
            kv_bound_R=sent.kv_bound,
            spans=sent.spans,
            deltas=tuple(each.delta for each in sent.deltas),
            copies=sent.copies,
            reset=sent.reset,
            expected=sent.expected,
            after=sent.after,
            drafts=sent.drafts,
            moves=sent.moves,
            adapters=sent.adapters,
            forgets=sent.forgets,
        )


def _sent_rows(rows: Rows) -> SentRows:
    return SentRows(
        rows.slots_R,
        rows.generations_R,
        rows.kinds_R,
        rows.num_tokens_R,
        rows.num_logits_R,
        rows.tokens_each,
        rows.features,
        rows.num_logprobs,
        rows.prefixes,
        rows.guided,
        rows.marks_R,
    )


def _rows(sent: SentRows) -> Rows:
    return Rows(
        slots_R=sent.slots,
        generations_R=sent.generations,
        kinds_R=sent.kinds,
        num_tokens_R=sent.num_tokens,
        num_logits_R=sent.num_logits,
        tokens_each=sent.tokens_each,
        features=sent.features,
        num_logprobs=sent.num_logprobs,
        prefixes=sent.prefixes,
        guided=sent.guided,
        marks_R=sent.marks,
    )


def _sent_delta(delta: Delta) -> Assigned | BlocksSet | Released:
    if isinstance(delta, Assign):
        return Assigned(delta)
    return BlocksSet(delta) if isinstance(delta, SetBlocks) else Released(delta)


def sent_masks(
    plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
) -> SentMasks:
    return SentMasks(plan_id, dict(masks), None if drafts is None else dict(drafts))
