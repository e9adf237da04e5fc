"""The contract between the control plane (engine) and the data plane (worker).

A plan says, per request, how many tokens to run at most. Prefill, a chunk of it, decode, what is left after a prefix
hit, resumption and speculation all take that one form. Several plans may be in flight. Results come back in order; they
are matched by plan id, and slots by their generation.

Who owns what
    engine   which rows run, how many tokens, which blocks; its token counts are optimistic until a result corrects them
    worker   everything indexed by slot on the device: kv_len, last token, stopped flag, block tables, sampling state.
             Positions are derived there from what earlier plans accepted, so plan N+1 needs no answer from plan N.

Slots change by deltas. `Assign` is the full form: it rebuilds a slot from nothing. After a failure the worker answers
every plan with `dropped` until a plan has `reset`; then it forgets all slots, and that plan's `Assign`s rebuild them.

Plans and their parts never change once they are made. Those that each step makes anew (`StepPlan`, `Rows`, `Assign`)
are no frozen dataclasses, since a frozen one takes five times as long to make.

Legend:
    R  rows of the plan
    D  drafts of a row
    W  words of 32 tokens
    K  tokens that some row of it may emit, at most
    L  likeliest tokens reported
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ridgeline.core.plan.crossed import CrossedPictures
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.sounds import SpeechRules, Waveform
from ridgeline.core.specs.pooling import Task
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.rows import Feature as Feature
from ridgeline.kernels.base.rows import Finish as Finish

WIDE = 1024  # logprobs of more tokens than these are reported apart, so that other rows have no columns for them


class RowKind(IntEnum):
    """The source of a row's input tokens, and their use."""

    TOKEN = 0  # the slot's last token, from which the next one is drawn
    VERIFY = 1  # that token and the drafts behind it; the row emits the drafts that turn out right, and one token more
    CHUNK = 2  # known tokens, given as a span


class PrefixGroup(NamedTuple):
    """Rows (ascending indices) whose block tables begin with the same blocks in every cache group of full attention.

    tokens: how many tokens these blocks hold. All of the blocks are full, and every row runs one token, behind them.
    """

    rows: np.ndarray
    tokens: int


class Guided(NamedTuple):
    """Two rows that take the same token. It is drawn with the parameters of `row`, from scale * (log-probabilities of
    `row` - log-probabilities of `negative`) + log-probabilities of `negative`."""

    row: int
    negative: int
    scale: float


@dataclass(slots=True)
class Rows:
    """The rows of a plan, as a struct of arrays. While the set of rows does not change, plans share one object (`is`),
    so a steady decode step uploads nothing.

    kinds_R: `RowKind`s, int8.
    num_tokens_R: the tokens to run, at most.
    num_logits_R: how many tokens the row emits, at most; 0 for a chunk that does not reach the end of the known tokens.
        As many trailing positions have their logits sampled, or all of a row that verifies a tree of drafts, which
        emits one more than the tree is deep.
    tokens_each: how many tokens every row runs, if that is the same for all: 1 in a decode step, k + 1 if all rows
        verify k drafts. 0 means that rows differ, or that there are chunks of more than one token. (A chunk of one
        token runs like any other row of one token; only the source of its token differs.)
    prefixes: rows that share blocks, each row in one group at most. They are a hint to read these blocks together; more
        rows than these may share blocks.
    guided: pairs among the sampling rows that take their token together.
    marks_R: after how many of its tokens a row's state is stored as well, in a block of its own, so that others can
        begin there; 0: it has no such mark. Where groups keep states that every token replaces, that block stands in
        the row's table, in the column of the last token before the mark. None: no row has a mark.
    encoded_R: the tokens of encoder input that each row's span brings. None: none brings any.
    """

    slots_R: np.ndarray
    generations_R: np.ndarray
    kinds_R: np.ndarray
    num_tokens_R: np.ndarray
    num_logits_R: np.ndarray
    tokens_each: int
    features: int
    num_logprobs: int
    prefixes: tuple[PrefixGroup, ...] = ()
    guided: tuple[Guided, ...] = ()
    marks_R: np.ndarray | None = None
    encoded_R: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.slots_R)


class Span(NamedTuple):
    """Input tokens for a row, in place of the slot's last token.

    token_ids: int32 [num_tokens of the row].
    inserted: vectors in the place of some tokens' embeddings, with places counted from the span's first token.
    encoded: the request's encoder input, which the encoder reads whole before the row runs. It comes with the request's
        first tokens.
    positions_3T: int32, of its tokens on three axes; None: those are as the slot's length and shift say.
    sound: what the encoder reads, if it reads sounds. `encoded` then only counts its outputs.
    heard: the cache holds what the encoder would leave, so it does not run.
    both_ways: (first, end) of its tokens that see each other both ways. None of these is ever cut.
    crossed: the request's pictures, if layers of cross attention see them. It comes with the first row of a slot.
    """

    row: int
    token_ids: np.ndarray
    inserted: tuple[Inserted, ...] = ()
    encoded: tuple[int, ...] = ()
    positions_3T: np.ndarray | None = None
    sound: Waveform | None = None
    heard: bool = False
    both_ways: tuple[tuple[int, int], ...] = ()
    crossed: CrossedPictures | None = None


@dataclass(slots=True)
class Assign:
    """The full form of a slot. The cache holds the tokens up to kv_len; the rest of the known tokens arrives as spans.

    last_token: the input of the next row without a span. -1: there is none yet; None: the device is still computing it.
    blocks: block ids from position 0 on, per cache group (NULL_BLOCK where a window has passed).
    prompt, output: the known tokens, for penalties and for the position in the random stream.
    task: what a model that pools makes of the prompt.
    embedded: the prompt came as vectors, and its tokens are placeholders.
    tenant: a number for the request's `cache_salt`, whatever characters that has.
    keys: the request's `prefix_keys`.
    adapter: the place of the request's adapter among those that the device holds, from 1; 0: it has none.
    shift: the difference between a token's position and its number, behind pictures with positions on three axes.
    speech: the rules of a recogniser's output; None: it is none.
    """

    slot: int
    generation: int
    kv_len: int
    last_token: int | None
    blocks: tuple[tuple[int, ...], ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_total_tokens: int
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    task: Task | None = None
    embedded: bool = False
    tenant: int = 0
    keys: tuple[str, ...] = ()
    adapter: int = 0
    shift: int = 0
    speech: SpeechRules | None = None


class PlacedAdapter(NamedTuple):
    """A place on the device, from 1, and the number of the adapter whose matrices are copied there before the plan's
    rows run."""

    place: int
    adapter: int


class SetBlocks(NamedTuple):
    """Overwrite a part of a slot's block table: entries start, start+1, … of one cache group."""

    slot: int
    group: int
    start: int
    block_ids: tuple[int, ...]


class Release(NamedTuple):
    """The slot's request has left; its state is dead until the next Assign."""

    slot: int


Delta = Assign | SetBlocks | Release


class CopyBlocks(NamedTuple):
    """Copy whole blocks of one cache group, in all its layers: targets[i] gets the contents of sources[i]."""

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class MoveBlocks(NamedTuple):
    """Whole blocks of one cache group, in all its layers: blocks[i] on the device, below[i] in the host's memory
    (`core.specs.host_layout`)."""

    group: int
    blocks: tuple[int, ...]
    below: tuple[int, ...]


class Moves(NamedTuple):
    """Blocks that move between the device and the host's memory.

    saves: the host's blocks get what the device's hold before this plan changes anything.
    loads: the device's blocks get what the host's hold once the saves of this plan are done. They are there for every
        later plan.
    awaited: they are there for this plan's rows as well.
    """

    saves: tuple[MoveBlocks, ...] = ()
    loads: tuple[MoveBlocks, ...] = ()
    awaited: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step. Blocks move, deltas are applied and blocks are copied before the rows run, in this order.

    kv_bound_R: an upper bound on the row's cached tokens after the step, all drafts included. It is exact unless the
        device stopped the row, or this plan or an earlier plan in flight emits fewer tokens than it may.
    copies: no block is both a source and a target, or a target twice. The same holds for memory that two groups share.
    expected: for debug checks, the full form of the slot of every row whose length is known for certain (all but
        those that verify, or did in a plan that was in flight); otherwise None.
    after: on a stage of a pipeline, the newest plan whose tokens this plan needs (`ranks/parts.py`).
    drafts: False if the next step should verify none, by what is known so far.
    moves: None: no blocks move between the device and the host's memory.
    adapters: those that get a place on the device, in this order. A later one may take an earlier one's place.
    forgets: names of vectors that the worker holds no longer. No row needs them.
    """

    id: int
    rows: Rows
    kv_bound_R: np.ndarray
    spans: tuple[Span, ...] = ()
    deltas: tuple[Delta, ...] = ()
    copies: tuple[CopyBlocks, ...] = ()
    reset: bool = False
    expected: Mapping[int, Assign] | None = None
    after: int = -1
    drafts: bool = True
    moves: Moves | None = None
    adapters: tuple[PlacedAdapter, ...] = ()
    forgets: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(np.add.reduce(self.rows.num_tokens_R))

    def shape(self, reach: float = 1.0) -> StepShape:
        """Return the shape that decides the plan's cost. reach: as in `StepShape`."""
        rows = self.rows
        encoded = () if rows.encoded_R is None else rows.encoded_R[rows.encoded_R > 0]
        sampled = int(np.add.reduce(rows.num_logits_R))
        return StepShape(rows.num_tokens_R, self.kv_bound_R, sampled, reach=reach, encoded=encoded)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of the emitted tokens, and of the likeliest tokens in their places.

    logprob_R: float32. If rows may emit K tokens, the entry of row r's token k is r * K + k, here and in the other
        fields.
    rank_R: 1 for the likeliest token.
    """

    logprob_R: np.ndarray
    rank_R: np.ndarray
    top_ids_RL: np.ndarray
    top_logprobs_RL: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a plan.

    tokens_RK: the tokens that each row emitted, in order, then -1. K is at least 1.
    emitted_R: how many tokens each row emitted, int32, at most its `Rows.num_logits_R`.
    drafted_R: how many drafts each row verified, int32. None: there were none.
    finish_R: `Finish` codes. They belong to the row's last token, or for NAN to the token that could not be drawn; no
        row emits anything after its end.
    pooled: row → the vector of a prompt that is complete, float32 [M], or those of its tokens [T, M]. Such a row emits
        nothing, and its finish is STOP, or NAN for a vector of which some is no number. Rows with
        `SpeechRules.aligned` emit their tokens besides, and finish as others.
    apart: row → StepLogprobs of the one token that it emitted, for rows whose logprobs are not among `logprobs`
        (`reports_apart`).
    prompt_logprobs: row → StepLogprobs of the prompt tokens that this chunk predicts (those at its start + 1 … its
        end), from the params' `scored_from` on.
    elapsed: the seconds that the device spent on the segments.
    num_tokens: how many tokens ran, where rows were cut to the drafts that there were. None: as many as planned.
    experts: what the experts of a mixture got until then, where the worker looked.
    stamps: when a rank came to the step's collectives and left them, if a setting asks for that (`parallel.stamps`),
        int64.
    error: the plan failed with this message.
    out_of_memory: it failed because the device had too little memory.
    device_lost: it failed because the device has stopped working. No later plan will run either.
    dropped: an earlier plan failed, so this one was not run.
    """

    plan_id: int
    tokens_RK: np.ndarray = field(default_factory=lambda: np.empty((0, 1), np.int32))
    emitted_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    finish_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    drafted_R: np.ndarray | None = None
    logprobs: StepLogprobs | None = None
    pooled: Mapping[int, np.ndarray] = field(default_factory=dict)
    apart: Mapping[int, StepLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, StepLogprobs] = field(default_factory=dict)
    elapsed: float = 0.0
    num_tokens: int | None = None
    experts: ExpertLoad | None = None
    stamps: np.ndarray | None = None
    error: str | None = None
    out_of_memory: bool = False
    device_lost: bool = False
    dropped: bool = False


class MaskedDrafts(NamedTuple):
    """Drafts of a row that has a mask. The host makes them, since it knows the tokens from which the mask follows.

    token_ids_D: int32.
    bits_DW: the mask behind each of them, uint32 [drafts, words].
    """

    token_ids_D: np.ndarray
    bits_DW: np.ndarray


def reports_apart(params: SamplingParams) -> bool:
    """Return True if a row's logprobs are of tokens that the request names, or of too many for columns that all rows
    have."""
    return params.logprob_token_ids is not None or (params.logprobs or 0) > WIDE


def features_of(params: SamplingParams, *, masked: bool) -> Feature:
    """Return the parts of the sample segment that a request with these parameters needs."""
    features = Feature.MASK if masked else Feature.NONE
    if params.temperature > 0:
        features |= Feature.RANDOM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            features |= Feature.FILTER
        if params.typical_p < 1:
            features |= Feature.FILTER | Feature.TYPICAL
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        features |= Feature.PENALTY
    if params.logit_bias:
        features |= Feature.BIAS
    if params.min_tokens:
        features |= Feature.MIN_TOKENS
    if params.num_logprobs is not None:
        features |= Feature.LOGPROBS
    if reports_apart(params):
        features |= Feature.APART
    if params.prompt_logprobs is not None:
        features |= Feature.PROMPT_LOGPROBS
    if params.guidance_scale != 1:
        features |= Feature.GUIDANCE
    return features
