"""The contract between the control plane (engine) and the data plane (worker).

A plan says, per request, how many tokens to run at most. Prefill, a chunk of it, decode, what is left after a prefix
hit, resumption and speculation are all that one form. Several plans may be in flight; results come back in order and
are matched by plan id, and slots by their generation.

Who owns what
    engine   which rows run, how many tokens, which blocks; its token counts are optimistic until a result corrects them
    worker   everything indexed by slot on the device: kv_len, last token, stopped flag, block tables, sampling state.
             Positions are derived there from what earlier plans accepted, so plan N+1 needs no answer from plan N.

Slots change by deltas. `Assign` is the full form: it rebuilds a slot from nothing. After a failure the worker answers
every plan with `dropped` until one has `reset`; then it forgets all slots, and the plan's `Assign`s rebuild them.

Legend: R rows of the plan, K tokens that some row of it may emit, L likeliest tokens reported, P prompt positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import NamedTuple, Protocol

import numpy as np

from ridgeline.core.request import SamplingParams


class Feature(IntFlag):
    """What the sample segment must do for at least one row. The union over rows picks the segment's variant."""

    NONE = 0
    RANDOM = 1  # some temperature > 0
    FILTER = 2  # top-k, top-p, min-p or typical-p
    PENALTY = 4  # repetition, presence or frequency
    BIAS = 8  # logit_bias
    MIN_TOKENS = 16
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64
    MASK = 128  # waits for token masks
    TYPICAL = 256  # typical-p among the filters
    GUIDANCE = 512  # some rows' scores are made of two rows' (`Rows.guided`)


class RowKind(IntEnum):
    """Where a row's input tokens come from, and what they are good for."""

    TOKEN = 0  # the slot's last token, from which the next one is drawn
    VERIFY = 1  # that token and the drafts behind it: as many tokens are emitted as turn out right, and one more
    CHUNK = 2  # known tokens, given as a span


class PrefixGroup(NamedTuple):
    """Rows (indices, ascending) whose block tables begin with the same blocks in every cache group of full attention.

    tokens: how many tokens these blocks hold. All are full, and every row runs one token that lies behind them.
    """

    rows: np.ndarray
    tokens: int


class Guided(NamedTuple):
    """Two rows that take the same token: it is drawn as `row` draws, from scale * (its log-probabilities - those of
    row `negative`) + those of row `negative`."""

    row: int
    negative: int
    scale: float


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a plan, a struct of arrays. While the set does not change, plans share one object (`is`), so a
    steady decode step uploads nothing.

    kinds_R: `RowKind`s, int8. num_tokens_R: tokens to run at most. num_logits_R: trailing positions whose logits are
    sampled, which bounds the tokens that the row emits (0: a chunk that does not reach the end of what is known).
    tokens_each: how many tokens every row brings, if that is the same for all of them: 1 in a decode step, k + 1 where
    all rows verify k drafts. 0: rows differ, or there are chunks of more than one token. (A chunk of one token runs
    like any other row of one token; only where its token comes from differs.) prefixes: rows that share blocks, each in
    one group at most; a hint to read them together, and there may be more. guided: of the rows that sample, those that
    do it in pairs.
    """

    slots_R: np.ndarray
    generations_R: np.ndarray
    kinds_R: np.ndarray
    num_tokens_R: np.ndarray
    num_logits_R: np.ndarray
    tokens_each: int
    features: Feature
    num_logprobs: int
    prefixes: tuple[PrefixGroup, ...] = ()
    guided: tuple[Guided, ...] = ()

    def __len__(self) -> int:
        return len(self.slots_R)


class Span(NamedTuple):
    """Input tokens for a row, in place of the slot's last token. (An encoder's output will be a second kind.)"""

    row: int
    token_ids: np.ndarray  # int32 [num_tokens of the row]


@dataclass(frozen=True, slots=True)
class Assign:
    """Full form of a slot. Tokens up to kv_len are in the cache; the rest of what is known arrives as spans.

    last_token: input of the next row without a span (-1: none yet; None: still on its way on the device).
    blocks: per cache group, block ids from position 0 (NULL_BLOCK where a window has passed).
    prompt, output: known tokens, for penalties and the random stream's position.
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


class SetBlocks(NamedTuple):
    """Overwrite part of a slot's block table: entries start, start+1, … of one group."""

    slot: int
    group: int
    start: int
    block_ids: tuple[int, ...]


class Release(NamedTuple):
    """The slot's request left; its state is dead until the next Assign."""

    slot: int


Delta = Assign | SetBlocks | Release


class CopyBlocks(NamedTuple):
    """Whole blocks of one group, in all its layers: targets[i] becomes what sources[i] holds."""

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Deltas apply, and blocks are copied, before the rows run.

    copies: no block, nor any memory that two groups share, is both a source and a target, or a target twice.
    kv_bound_R: at most this many tokens are in the cache after the row ran (exact unless the device stopped the row, or
    an earlier plan in flight, or this one, emits fewer of its tokens than it may).
    expected: the full form of the slot of every row whose length is known for certain (all but those that verify), when
    the engine runs with debug checks; else None.
    """

    id: int
    rows: Rows
    kv_bound_R: np.ndarray
    spans: tuple[Span, ...] = ()
    deltas: tuple[Delta, ...] = ()
    copies: tuple[CopyBlocks, ...] = ()
    reset: bool = False
    expected: Mapping[int, Assign] | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.rows.num_tokens_R.sum())


class Finish:
    """Why the device stopped a row. NAN: its scores were no numbers, so there was no token to draw."""

    NONE, STOP, LENGTH, NAN = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of the emitted tokens: logprob_R float32, rank_R (1 = likeliest), top_ids_RL, top_logprobs_RL. Where rows may
    emit K tokens the entry of row r's token k is r * K + k."""

    logprob_R: np.ndarray
    rank_R: np.ndarray
    top_ids_RL: np.ndarray
    top_logprobs_RL: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave.

    emitted_R: how many tokens a row emitted, int32, at most its `Rows.num_logits_R`. tokens_RK: these tokens in their
    order, then -1; K is at least the largest bound of the plan's rows, and 1. finish_R: `Finish` codes, which belong to
    the row's last token (NAN: to the one that could not be drawn): no row emits anything behind its end.
    error: the plan failed with this message. out_of_memory: because the device had too little of it.
    device_lost: because the device works no more, and no later plan will run either. dropped: an earlier plan failed,
    this one was not run.
    prompt_logprobs: row → StepLogprobs of the prompt tokens that this chunk predicts (those at its start + 1 … its
    end), from the params' `scored_from` on.
    elapsed: seconds the device spent on the segments.
    """

    plan_id: int
    tokens_RK: np.ndarray = field(default_factory=lambda: np.empty((0, 1), np.int32))
    emitted_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    finish_R: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    logprobs: StepLogprobs | None = None
    prompt_logprobs: Mapping[int, StepLogprobs] = field(default_factory=dict)
    elapsed: float = 0.0
    error: str | None = None
    out_of_memory: bool = False
    device_lost: bool = False
    dropped: bool = False


class Worker(Protocol):
    """One device rank (or a group that acts as one). Calls return at once; only `collect` waits."""

    def submit(self, plan: StepPlan) -> None:
        """Launch the plan's forward segment, and its sample segment unless a row waits for a mask."""

    def provide_masks(self, plan_id: int, masks: Mapping[int, np.ndarray]) -> None:
        """Launch the sample segment of a waiting plan. masks: row → packed bits, uint32 [words] (`core.token_bits`), of
        the tokens that may be drawn; rows without one draw any. The arrays must last until the plan is collected.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest plan not yet collected."""

    def shutdown(self) -> None: ...


def features_of(params: SamplingParams, *, masked: bool) -> Feature:
    """Which parts of the sample segment a request with these parameters needs."""
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
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    if params.prompt_logprobs is not None:
        features |= Feature.PROMPT_LOGPROBS
    if params.guidance_scale != 1:
        features |= Feature.GUIDANCE
    return features
