"""The caller's side of one running request: token events go in, text and logprobs come out."""

from __future__ import annotations

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import PromptLogprobs, Request, TokenEvent
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.outputs import CompletionOutput, RequestOutput, ScoredTokens
from ridgeline.text.repetition import Repetition
from ridgeline.text.tokenizer import Tokenizer


class Completion:
    """A completion that fills `output` (and the prompt logprobs of `parent`) as events arrive. Without a tokenizer the
    text stays empty. `shown` is as in `Detokenizer`."""

    def __init__(
        self,
        request: Request,
        output: CompletionOutput,
        parent: RequestOutput,
        tokenizer: Tokenizer | None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.output = output
        self.parent = parent
        tokenizer = tokenizer if request.params.detokenize else None
        self._text_of = tokenizer.text_of if tokenizer else _no_text
        self._detokenizer = Detokenizer(tokenizer, request.params, request.prompt_tokens, shown) if tokenizer else None
        repetition = request.params.repetition_detection
        self._repetition = Repetition(repetition) if repetition is not None and repetition.max_pattern_size else None
        self._logprobs: ScoredTokens | None = None
        self._prompt_logprobs: ScoredTokens | None = None
        self._repeats_at: int | None = None  # tokens of the output when it was found to repeat itself
        if request.params.num_logprobs is not None:
            named = request.params.logprob_token_ids is not None
            output.logprobs = self._logprobs = ScoredTokens(self._text_of, named=named)
            output.cumulative_logprob = 0.0

    def take(self, event: TokenEvent) -> str:
        """Account for one event and return the text that became certain. If the tokenizer fails, its error ends the
        completion."""
        try:
            return self._take(event)
        except InvalidRequest as error:
            return self._fail(error)

    def _take(self, event: TokenEvent) -> str:
        output, text = self.output, ""
        if event.vector is not None:
            output.aligned = event.vector
        if event.prompt_logprobs:
            self._add_prompt_logprobs(event.prompt_logprobs)
        if event.token_id >= 0:
            self._add_logprobs(event)
            text = self.take_token(
                event.token_id, is_stop=event.finish_reason == "stop", ends=event.finish_reason is not None
            )
        if event.finish_reason is not None and not output.finished:
            if self.request.params.prompt_logprobs is not None and self.parent.prompt_logprobs is None:
                self._begin_prompt(len(self.request.prompt_token_ids))  # nothing was to be scored
            output.finish_reason, output.error = event.finish_reason, event.error
            if event.finish_reason == "stop" and event.token_id in self.request.stop_ids:
                output.stop_reason = event.token_id
            rest = self._detokenizer.finish() if self._detokenizer else ""
            self._add_text(rest)
            text += rest
            if self._detokenizer is not None and self._detokenizer.stopped is not None:
                output.finish_reason, output.stop_reason = "stop", self._detokenizer.stopped
        return text

    def take_token(self, token_id: int, *, is_stop: bool = False, ends: bool = False) -> str:
        """Account for a token that has no event. It may complete a stop string or a repetition, which end the
        completion. `ends` says that it is the last in any case."""
        output, detokenizer = self.output, self._detokenizer
        output.token_ids.append(token_id)
        repeats = self._repetition is not None and self._repetition.take(token_id) and not ends
        text = ""
        if detokenizer is not None:
            try:
                text = detokenizer.push(token_id, is_stop=is_stop)
            except InvalidRequest as error:
                return self._fail(error)
            if detokenizer.stopped is not None:
                output.finish_reason, output.stop_reason = "stop", detokenizer.stopped
        if repeats and not output.finished and len(output.token_ids) >= max(self.request.params.min_tokens, 1):
            self._repeats_at = len(output.token_ids)
            output.finish_reason, output.stop_reason = "repetition", "repetition_detected"
            text += detokenizer.finish() if detokenizer is not None else ""
        self._add_text(text)
        return text

    def _add_text(self, piece: str) -> None:
        """Add to the output's text. A string that nothing else refers to grows where it is; a copy for each token would
        take time that grows with the square of the output."""
        text, self.output.text = self.output.text, ""
        text += piece
        self.output.text = text

    def _fail(self, error: InvalidRequest) -> str:
        self.output.finish_reason, self.output.error = "error", str(error)
        return ""

    @property
    def abort_at(self) -> int | None:
        """The number of output tokens to keep if a stop string or a repetition was found, because the engine has not
        seen it yet."""
        if self._repeats_at is not None:
            return self._repeats_at
        return self._detokenizer.at_token if self._detokenizer else None

    def _add_logprobs(self, event: TokenEvent) -> None:
        if event.logprobs is not None and self._logprobs is not None:
            self._logprobs.add(event.token_id, event.logprobs)
            self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + event.logprobs.logprob

    def _begin_prompt(self, unscored: int) -> ScoredTokens:
        """Begin the logprobs of the prompt, whose first tokens have none."""
        self.parent.prompt_logprobs = found = ScoredTokens(self._text_of, unscored=unscored)
        return found

    def _add_prompt_logprobs(self, scores: PromptLogprobs) -> None:
        if self.output.index:
            return  # every completion has the same prompt
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self._begin_prompt(self.request.params.scored_from or 1)
        self._prompt_logprobs.extend(self.request.prompt_token_ids[len(self._prompt_logprobs) :], scores)


def _no_text(token_id: int) -> None:
    return None
