"""The results that a caller gets back. Names and fields are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ridgeline.core.request import RequestStats, SamplingParams


@dataclass(frozen=True, slots=True)  # an answer may hold millions
class Logprob:
    """A token's natural logarithm of probability (`logprob`), its `rank` (1 is the likeliest) and its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenIdLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One completion. `finish_reason` is None while it runs, then "stop", "length", "repetition", "abort" or "error".

    `stop_reason` is the stop string or stop token id that ended it, "repetition_detected" after a repetition, and None
    after end-of-sequence or length. `score`
    is what beam search ranked it by.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: list[TokenIdLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestStats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its completions, filled as tokens arrive.

    `prompt_logprobs[0]` is None because nothing precedes the first token. The entries before `prompt_logprobs_start`
    are None too.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenIdLogprobs | None] | None = None

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
