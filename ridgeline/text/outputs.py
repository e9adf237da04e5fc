"""The results that a caller gets back. Names and fields are vLLM's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, overload

import numpy as np

from ridgeline.core.plan.request import PromptLogprobs, RequestStats, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural logarithm of probability (`logprob`), its `rank` (1 is the likeliest) and its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenIdLogprobs = dict[int, Logprob]


class ScoredTokens(Sequence[Any]):
    """The logprobs of a prompt's or an output's tokens: a sequence of `TokenIdLogprobs`, or of None for the first
    `unscored` tokens. It equals a list of the same, and is pickled and copied as one.

    An answer may have millions of entries. As objects they take a hundred bytes each, and the garbage collector visits
    all of them again and again, during which nothing else runs. So they are numbers side by side, and an entry is made
    when it is read.

    `text_of` returns a token's text. If the request `named` the tokens whose logprobs it wants, they have no ranks, and
    the token that stands there comes first.
    """

    def __init__(self, text_of: Callable[[int], str | None], *, unscored: int = 0, named: bool = False) -> None:
        self._text_of, self._unscored, self._named = text_of, unscored, named
        self._ids, self._ranks, self._logprobs = array("i"), array("i"), array("f")
        self._ends = array("q")  # of each token's part of the arrays below
        self._top_ids, self._top_logprobs = array("i"), array("f")

    def add(self, token_id: int, entry: TokenLogprobs) -> None:
        """Add one token."""
        self._ids.append(token_id)
        self._ranks.append(entry.rank)
        self._logprobs.append(entry.logprob)
        self._top_ids.extend(entry.top_ids)
        self._top_logprobs.extend(entry.top_logprobs)
        self._ends.append(len(self._top_ids))

    def extend(self, token_ids: Sequence[int], scores: PromptLogprobs) -> None:
        """Add the first of these tokens, as many as there are scores."""
        count, before = len(scores), len(self._top_ids)
        self._ids.extend(token_ids[:count])
        self._ranks.frombytes(scores.ranks)
        self._logprobs.frombytes(scores.logprobs)
        self._top_ids.frombytes(scores.top_ids)
        self._top_logprobs.frombytes(scores.top_logprobs)
        width = (len(self._top_ids) - before) // max(count, 1)
        self._ends.extend(before + width * (i + 1) for i in range(count))

    def logprob(self, index: int) -> float | None:
        """Return the logprob of the token that stands there; None for a token without any."""
        place = index - self._unscored
        return self._logprobs[place] if 0 <= place < len(self._ids) else None

    def numbers(self, index: int) -> list[tuple[int, float]] | None:
        """Return the likeliest tokens in a place and their logprobs, and behind them those of the token that stands
        there; None for a token without any."""
        place = index - self._unscored
        if not 0 <= place < len(self._ids):
            return None
        own = slice(self._ends[place - 1] if place else 0, self._ends[place])
        chosen = self._ids[place], self._logprobs[place]
        return [*zip(self._top_ids[own], self._top_logprobs[own], strict=True), chosen]

    def __len__(self) -> int:
        return self._unscored + len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = range(len(self))[index]
        return self._entry(found) if isinstance(found, int) else [self._entry(i) for i in found]

    def __iter__(self) -> Iterator[Any]:
        return map(self._entry, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (ScoredTokens, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _entry(self, index: int) -> TokenIdLogprobs | None:
        found = self.numbers(index)
        if found is None:
            return None
        (token_id, logprob), place, named = found.pop(), index - self._unscored, self._named
        text_of = self._text_of
        chosen = {token_id: Logprob(logprob, self._ranks[place], text_of(token_id))}
        if named:
            return chosen | {top: Logprob(value, None, text_of(top)) for top, value in found if top != token_id}
        entry = {top: Logprob(value, rank, text_of(top)) for rank, (top, value) in enumerate(found, 1)}
        return entry if token_id in entry else entry | chosen


@dataclass
class CompletionOutput:
    """One completion. `finish_reason` is None while it runs, then "stop", "length", "repetition", "abort" or "error".

    `stop_reason` is the stop string or stop token id that ended it, "repetition_detected" after a repetition, and None
    after end-of-sequence or length. `score` is what beam search ranked it by. `aligned` is the attention of the
    prompt's last tokens to a sound, float32 [T, F], if its request asked for that.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: ScoredTokens | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestStats | None = None
    aligned: np.ndarray | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its completions, filled as tokens arrive.

    `prompt_logprobs[0]` is None because nothing precedes the first token. The entries before `prompt_logprobs_start`
    are None too. `weight_version` is that of the weights, which `LLM.update_weights` counts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: ScoredTokens | None = None
    weight_version: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def keep_best(self, params: SamplingParams) -> None:
        """Keep the `n` likeliest of `best_of` completions, by the sum of their logprobs, the best first. All must have
        ended."""
        if params.num_drawn == params.n:
            return
        by_logprob = sorted(self.outputs, key=lambda o: -(o.cumulative_logprob or 0.0) if o.token_ids else inf)
        self.outputs[:] = by_logprob[: params.n]
        for index, output in enumerate(self.outputs):
            output.index = index
            output.logprobs = None if params.logprobs is None else output.logprobs

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the first completion found in the prefix cache."""
        metrics = self.outputs[0].metrics
        return metrics.cached_tokens if metrics else 0
