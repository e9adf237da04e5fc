"""The caller's side of one running request: token events go in, text and logprobs come out."""

from __future__ import annotations

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.request import Request, TokenEvent, TokenLogprobs
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.outputs import CompletionOutput, Logprob, RequestOutput, TokenIdLogprobs
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
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._detokenizer = (
            Detokenizer(self._tokenizer, request.params, request.prompt_token_ids, shown) if self._tokenizer else None
        )
        if request.params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0

    def take(self, event: TokenEvent) -> str:
        """Account for one event and return the text that became certain. If the tokenizer fails, its error ends the
        completion."""
        try:
            return self._take(event)
        except InvalidRequest as error:
            return self._fail(error)

    def _take(self, event: TokenEvent) -> str:
        output, text = self.output, ""
        if event.prompt_logprobs:
            self._add_prompt_logprobs(event.prompt_logprobs)
        if event.token_id >= 0:
            self._add_logprobs(event)
            text = self.take_token(event.token_id, is_stop=event.finish_reason == "stop")
        if event.finish_reason is not None and not output.finished:
            if self.request.params.prompt_logprobs is not None and self.parent.prompt_logprobs is None:
                self.parent.prompt_logprobs = [None] * len(self.request.prompt_token_ids)  # nothing was to be scored
            output.finish_reason, output.error = event.finish_reason, event.error
            if event.finish_reason == "stop" and event.token_id in self.request.stop_ids:
                output.stop_reason = event.token_id
            rest = self._detokenizer.finish() if self._detokenizer else ""
            output.text += rest
            text += rest
            if self._detokenizer is not None and self._detokenizer.stopped is not None:
                output.finish_reason, output.stop_reason = "stop", self._detokenizer.stopped
        return text

    def take_token(self, token_id: int, *, is_stop: bool = False) -> str:
        """Account for a token that has no event. It may complete a stop string, which ends the completion."""
        output, detokenizer = self.output, self._detokenizer
        output.token_ids.append(token_id)
        if detokenizer is None:
            return ""
        try:
            text = detokenizer.push(token_id, is_stop=is_stop)
        except InvalidRequest as error:
            return self._fail(error)
        output.text += text
        if detokenizer.stopped is not None:
            output.finish_reason, output.stop_reason = "stop", detokenizer.stopped
        return text

    def _fail(self, error: InvalidRequest) -> str:
        self.output.finish_reason, self.output.error = "error", str(error)
        return ""

    @property
    def abort_at(self) -> int | None:
        """The number of output tokens to keep if a stop string was found, because the engine does not know of it
        yet."""
        return self._detokenizer.at_token if self._detokenizer else None

    def _add_logprobs(self, event: TokenEvent) -> None:
        output = self.output
        if event.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(self._by_id(event.token_id, event.logprobs))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + event.logprobs.logprob

    def _add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        if self.output.index:
            return  # every completion has the same prompt
        known = self.parent.prompt_logprobs
        if known is None:
            known = self.parent.prompt_logprobs = [None] * (self.request.params.scored_from or 1)
        prompt = self.request.prompt_token_ids
        start = len(known)
        known.extend(self._by_id(prompt[start + i], entry) for i, entry in enumerate(entries))

    def _by_id(self, token_id: int, entry: TokenLogprobs) -> TokenIdLogprobs:
        ranks = range(1, len(entry.top_ids) + 1)
        found = {
            top: Logprob(logprob, rank, self._text_of(top))
            for top, logprob, rank in zip(entry.top_ids, entry.top_logprobs, ranks, strict=True)
        }
        if token_id not in found:
            found[token_id] = Logprob(entry.logprob, entry.rank, self._text_of(token_id))
        return found

    def _text_of(self, token_id: int) -> str | None:
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if self._tokenizer else None
