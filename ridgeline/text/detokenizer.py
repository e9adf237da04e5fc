"""Conversion of the engine's token ids to the text that a client sees."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.plan.request import SamplingParams
from ridgeline.text.stop_strings import StopMatcher
from ridgeline.text.token_stream import TokenStream
from ridgeline.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one request as it grows. It ends where a stop string begins.

        piece = detokenizer.push(event.token_id, is_stop=event.token_id in request.all_stop_ids)
        if detokenizer.stopped is not None:
            engine.abort(request.id, at_token=detokenizer.at_token)
        ...
        piece += detokenizer.finish()  # when the request has ended, however it did

    The pieces join to the text that decoding prompt and output together adds to the prompt's text. It is cut at the
    first stop string that is complete, which stays with include_stop_str_in_output.

    `shown` are special tokens that have text even if special tokens are skipped.

    `stopped` is that string. `at_token` is the number of output tokens that completed it; later tokens that were
    already under way are ignored. `num_tokens` counts the tokens pushed. As with vLLM, no stop string ends a request
    before min_tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        shown: frozenset[int] = frozenset(),
    ) -> None:
        # A stop string that is a special token's text would never be seen
        shown |= {tokenizer.added[text] for text in params.stop_strings if text in tokenizer.added}
        self._stream = TokenStream(tokenizer, prompt_ids, params.skip_special_tokens, shown)
        keep_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop_strings, keep_stop=keep_stop) if params.stop_strings else None
        self._keep_stop = keep_stop
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.stopped: str | None = None
        self.at_token: int | None = None

    def push(self, token_id: int, is_stop: bool = False) -> str:
        """Add one token and return the text that is certain now; "" once stopped.

        `is_stop` says that this is the end-of-sequence or stop id that ended the request. It has text only with
        include_stop_str_in_output and, because it is usually a special token, only without skip_special_tokens.
        """
        if self.stopped is not None:
            return ""
        self.num_tokens += 1
        if is_stop and not self._keep_stop:
            return ""
        return self._match(self._stream.push(token_id))

    def finish(self) -> str:
        """Return the text held back so far: half a character, or the possible beginning of a stop string. "" once
        stopped."""
        if self.stopped is not None:
            return ""
        rest = self._match(self._stream.finish())
        return rest if self._matcher is None else rest + self._matcher.finish()

    def _match(self, piece: str) -> str:
        if self._matcher is None or not piece:
            return piece
        certain = self._matcher.push(piece, may_stop=self.num_tokens >= self._min_tokens)
        if self._matcher.stop is not None:
            self.stopped, self.at_token = self._matcher.stop, self.num_tokens
        return certain
