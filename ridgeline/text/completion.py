"""The caller's side of one running request: token events in, text and logprobs out."""

from __future__ import annotations

from ridgeline.core.request import Request, TokenEvent, TokenLogprobs
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.outputs import CompletionOutput, Logprob, RequestOutput, TokenIdLogprobs
from ridgeline.text.tokenizer import Tokenizer


class Completion:
    """Fills `output` (and the prompt logprobs of `parent`) as events arrive. Without a tokenizer text stays empty."""

    def __init__(self, request: Request, output: CompletionOutput, parent: RequestOutput, tokenizer: Tokenizer | None):
        self.request = request
        self.output = output
        self.parent = parent
        self._tokenizer = tokenizer
        wants_text = tokenizer is not None and request.params.detokenize
        self._detokenizer = (
            Detokenizer(tokenizer, request.params, request.prompt_token_ids) if tokenizer and wants_text else None
        )
        if request.params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0

    def take(self, event: TokenEvent) -> str:
        """Account for one event; returns the text that became certain."""
        output = self.output
        if event.prompt_logprobs:
            self._add_prompt_logprobs(event.prompt_logprobs)
        text = self._take_token(event) if event.token_id >= 0 else ""
        stopped = self._detokenizer is not None and self._detokenizer.stopped is not None
        if stopped and self._detokenizer is not None:
            output.finish_reason, output.stop_reason = "stop", self._detokenizer.stopped
        elif event.finish_reason is not None:
            output.finish_reason, output.error = event.finish_reason, event.error
            if event.finish_reason == "stop" and event.token_id in self.request.stop_ids:
                output.stop_reason = event.token_id
            text += self._detokenizer.finish() if self._detokenizer else ""
        output.text += text
        return text

    @property
    def abort_at(self) -> int | None:
        """Output tokens to keep when a stop string was found: the engine does not know yet."""
        return self._detokenizer.at_token if self._detokenizer else None

    def _take_token(self, event: TokenEvent) -> str:
        output = self.output
        output.token_ids.append(event.token_id)
        if event.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(self._by_id(event.token_id, event.logprobs))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + event.logprobs.logprob
        if self._detokenizer is None:
            return ""
        return self._detokenizer.push(event.token_id, is_stop=event.finish_reason == "stop")

    def _add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        if self.output.index:
            return  # the same prompt for every completion
        known = self.parent.prompt_logprobs
        if known is None:
            known = self.parent.prompt_logprobs = [None]
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
