"""Beam search over one prompt: which beams go on, which have ended, and when to stop. The caller runs the model.

The rules are those of transformers' `generate(num_beams=…)`, so that the same model finds the same sequences. Of all
beams' continuations the best `candidates` are looked at. Those that end are kept if they are among the first
`beam_width`; the best `beam_width` of the others go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Literal, NamedTuple

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.settings.vllm_arguments import BEAM_SEARCH, with_vllms_fields
from ridgeline.text.outputs import CompletionOutput, RequestOutput
from ridgeline.text.tokenizer import Tokenizer

MAX_BEAMS = 64
MAX_CANDIDATES = 1024  # the likeliest tokens that one beam reports


@with_vllms_fields(BEAM_SEARCH)
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a search.

    Sequences are ranked by the sum of their logprobs over length ** length_penalty. The length is that of the output in
    tokens, so a penalty above 0 favours long sequences.

    `early_stopping` says what to do once beam_width sequences have ended. True stops. False stops when no beam would
    rank above the worst of them if it ended now. "never" stops when no beam could do so at any length.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        whole = {"beam_width": MAX_BEAMS, "max_tokens": 2**31 - 1}
        for name, most in whole.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidRequest(f"{name} must be a whole number from 1 to {most}, got {value!r}.", param=name)
        penalty = self.length_penalty
        if not isinstance(penalty, (int, float)) or isinstance(penalty, bool) or not -100 <= penalty <= 100:
            raise InvalidRequest(f"length_penalty must be from -100 to 100, got {penalty!r}.", param="length_penalty")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(
                f'early_stopping is True, False or "never", got {self.early_stopping!r}.', param="early_stopping"
            )
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be True or False, got {self.ignore_eos!r}.", param="ignore_eos")
        SamplingParams(stop_token_ids=self.stop_token_ids)  # type: ignore[arg-type]  # raises for others than ids


@dataclass(frozen=True, kw_only=True)
class _BeamStep(SamplingParams):
    """One step of one beam: a request for one token, of which only the logprobs of the likeliest tokens are used."""

    @property
    def is_bounded(self) -> bool:
        return False


class Beam(NamedTuple):
    """A beam that has not ended. `tokens` are those of the output, and `logprob` is the sum of their logprobs."""

    tokens: tuple[int, ...]
    logprob: float


class EndedBeam(NamedTuple):
    """A beam that has ended. `score` is the number it is ranked by."""

    score: float
    beam: Beam


class BeamSearch:
    """The search over one prompt.

    `running` holds the beams whose next token is to be found, the best first. It is empty once `ended`, the best first,
    is final or there was an `error`. `stop_ids` are the tokens that end a sequence. `max_tokens` bounds the output,
    where the context holds fewer tokens than the parameters ask for.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: Collection[int], max_tokens: int) -> None:
        self.running = [Beam((), 0.0)]
        self.ended: list[EndedBeam] = []
        self.error: str | None = None
        self._params, self._stop_ids, self._max_tokens = params, frozenset(stop_ids), max_tokens
        self._candidates = max(2, 1 + len(self._stop_ids)) * params.beam_width
        if self._candidates > MAX_CANDIDATES:
            raise InvalidRequest(
                f"beam_width {params.beam_width} with {len(self._stop_ids)} stop ids needs {self._candidates} "
                f"candidates, of at most {MAX_CANDIDATES}; use fewer beams.",
                param="beam_width",
            )

    @property
    def step_params(self) -> SamplingParams:
        """The parameters of a request for one token after each beam, whose `logprobs` go into `advance`."""
        return _BeamStep(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=self._candidates)

    def advance(self, logprobs: Sequence[Mapping[int, float]]) -> None:
        """Extend the running beams by their likeliest next tokens (token id → logprob)."""
        width, penalty = self._params.beam_width, self._params.length_penalty
        length = len(self.running[0].tokens) + 1
        grown = chain.from_iterable(
            ((beam.logprob + logprob, beam, token) for token, logprob in likeliest.items())
            for beam, likeliest in zip(self.running, logprobs, strict=True)
        )
        chosen = heapq.nlargest(self._candidates, grown, key=itemgetter(0))  # most are never written out
        best = [Beam((*beam.tokens, token), logprob) for logprob, beam, token in chosen]
        at_end = length >= self._max_tokens
        ends = [at_end or beam.tokens[-1] in self._stop_ids for beam in best]
        now = [
            EndedBeam(beam.logprob / length**penalty, beam)
            for beam, end in zip(best[:width], ends, strict=False)
            if end
        ]
        self.ended = heapq.nlargest(width, [*self.ended, *now], key=lambda ended: ended.score)
        self.running = [beam for beam, end in zip(best, ends, strict=True) if not end][:width]
        if self._is_done(length):
            self.running = []

    def take(self, results: Sequence[RequestOutput]) -> None:
        """Call `advance` with the results of `step_params` for each running beam. A failed request ends the search."""
        outputs = [result.outputs[0] for result in results]
        self.error = next((output.error or "it was aborted." for output in outputs if not output.logprobs), None)
        if self.error is not None:
            self.running = []
        else:
            steps = [output.logprobs[0] for output in outputs if output.logprobs]
            self.advance([{token: entry.logprob for token, entry in step.items()} for step in steps])

    def fill(self, result: RequestOutput, tokenizer: Tokenizer | None) -> RequestOutput:
        """Put the sequences found into `result`, the best first; or an output without tokens if the search failed."""
        if self.error is not None:
            result.outputs[:] = [CompletionOutput(0, finish_reason="error", error=self.error)]
            return result
        result.outputs[:] = [
            CompletionOutput(
                index,
                text=tokenizer.decode(ended.beam.tokens) if tokenizer else "",
                token_ids=list(ended.beam.tokens),
                cumulative_logprob=ended.beam.logprob,
                score=ended.score,
                finish_reason="stop" if ended.beam.tokens[-1] in self._stop_ids else "length",
            )
            for index, ended in enumerate(self.ended)
        ]
        return result

    def _is_done(self, length: int) -> bool:
        if not self.running:
            return True
        if len(self.ended) < self._params.beam_width:
            return False
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if early is True:
            return True
        longest = self._max_tokens if early == "never" and penalty > 0 else length
        return self.running[0].logprob / longest**penalty <= self.ended[-1].score
