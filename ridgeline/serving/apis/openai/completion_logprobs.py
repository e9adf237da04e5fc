"""Logprobs in OpenAI's older form, that of `/v1/completions`: four lists side by side.

It names tokens by their text, so two tokens of one place may not have the same name. A token that is no text by itself
is spelled as OpenAI spelled it, "bytes:\\xe2\\x80". If the names of two tokens still are the same, the one that was not
drawn becomes "token_id:7".
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.serving.http import answers
from ridgeline.serving.http.pieces import later
from ridgeline.serving.http.shapes import finite
from ridgeline.text.outputs import CompletionOutput, ScoredTokens
from ridgeline.text.token_stream import EACH_BYTE
from ridgeline.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _Row(NamedTuple):
    """A token, and where its entry is, which is made when it is encoded."""

    token_id: int
    place: int
    entries: ScoredTokens | None
    number: int

    @property
    def logprob(self) -> float | None:
        """The token's logprob. It is None for the first token of a prompt, which nothing predicts."""
        found = None if self.entries is None else self.entries.logprob(self.number)
        return None if found is None else finite(found)

    @property
    def numbers(self) -> list[tuple[int, float]] | None:
        return None if self.entries is None else self.entries.numbers(self.number)


class Offsets:
    """The places of tokens in the text that they make, counted in characters.

    A token that begins within a character has the place of that character. Tokens in `hidden` have no text (None: no
    token has). `bare` says that no text precedes the first token, whose leading space the tokenizer may then drop.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, *, hidden: frozenset[int] | None, bare: bool) -> None:
        self.end = start
        self._tokenizer, self._hidden, self._bare = tokenizer, hidden, bare
        self._decoder = _Utf8Decoder(EACH_BYTE if tokenizer.uses_byte_fallback else "replace")

    def place(self, token_id: int) -> int:
        """Return the token's place, and go on behind it."""
        if self._hidden is None or token_id in self._hidden:
            return self.end
        data = self._tokenizer.token_bytes(token_id)
        if data and not 0x80 <= data[0] < 0xC0:  # no more bytes of a character that has begun
            self.finish()
        place = self.end
        if self._bare and data:
            self._bare = False
            if data[0] == 0x20 and not self._tokenizer.decode([token_id], skip_special_tokens=False).startswith(" "):
                data = data[1:]
        self.end += len(self._decoder.decode(data))
        return place

    def finish(self) -> int:
        """Return the length of the whole text, in which half a character at the end is one."""
        self.end += len(self._decoder.decode(b"", final=True))
        return self.end


class CompletionLogprobs:
    """The logprobs of one choice, which come with its text.

    `echo` is the prompt's text, if it is repeated before the output's, with its tokens and their entries. `top` is the
    number of likeliest tokens at each place (-1: all that the entries have). With `by_id` a token's name is
    "token_id:7".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        top: int,
        *,
        by_id: bool,
        hidden: frozenset[int] | None,
        bare: bool,
        echo: tuple[str, Sequence[int], ScoredTokens | None] | None = None,
    ) -> None:
        self._tokenizer, self._top, self._by_id = tokenizer, top, by_id
        self._told = 0
        text, ids, entries = echo or ("", (), None)
        self._before = len(text)
        self._offsets = Offsets(tokenizer, len(text), hidden=hidden, bare=bare and not text)
        self._waiting: list[_Row] = []
        if ids:
            self._add(ids, entries, 0, _places_in(text, ids, tokenizer))

    def take(self, output: CompletionOutput, *, shown: bool = True) -> answers.CompletionLogprobs:
        """Return the logprobs that were not returned before; their `top_logprobs` yields one place after the other. A
        token that lies behind the text so far waits for it, or until the output ends. With shown=False the output
        counts as empty."""
        text = ""
        if shown and output.logprobs is not None:
            text, start, self._told = output.text, self._told, len(output.logprobs)
            ids = output.token_ids[start : self._told]
            self._add(ids, output.logprobs, start, [self._offsets.place(token_id) for token_id in ids])
        end, rows = self._before + len(text), self._waiting
        certain = len(rows)
        if shown and not output.finished:
            certain = next((n for n, row in enumerate(rows) if row.place > end), certain)
        self._waiting, rows = rows[certain:], rows[:certain]
        return answers.CompletionLogprobs(
            tokens=[self._name(row.token_id) for row in rows],
            token_logprobs=[row.logprob for row in rows],
            top_logprobs=later(map(self._top_of, rows)),
            text_offset=[min(row.place, end) for row in rows],
        )

    def _add(self, ids: Sequence[int], entries: ScoredTokens | None, start: int, places: Sequence[int]) -> None:
        """Add tokens, whose entries begin at `start`."""
        pairs = enumerate(zip(ids, places, strict=True), start)
        self._waiting += [_Row(token_id, place, entries, number) for number, (token_id, place) in pairs]

    def _top_of(self, row: _Row) -> dict[str, float] | None:
        """Return the logprobs of the token that stands there, which is first as in vLLM, and of the likeliest ones, by
        different names."""
        numbers = row.numbers
        if numbers is None:
            return None
        *likeliest, (chosen, logprob) = numbers
        found = {self._name(chosen): finite(logprob)}
        for token_id, each in likeliest[: self._top if self._top >= 0 else None]:
            name = self._name(token_id)
            if token_id != chosen and name in found:
                name = f"token_id:{token_id}"
            found[name] = finite(each)
        return found

    def _name(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        text, whole = self._tokenizer.spelled(token_id)
        return text if whole and text else f"bytes:{text}" if text else f"token_id:{token_id}"


def _places_in(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the places of a prompt's tokens. A token that the tokenizer put before the text has none in it, so places
    are counted from the text's end."""
    offsets = Offsets(tokenizer, hidden=frozenset(), bare=True)
    places = [offsets.place(token_id) for token_id in ids]
    shift = len(text) - offsets.finish()
    return [max(place + shift, 0) for place in places]
