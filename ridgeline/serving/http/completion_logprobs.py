"""Logprobs in OpenAI's older form, that of `/v1/completions`: four lists side by side.

It names tokens by their text, so two tokens of one place may not have the same name. A token that is no text by itself
is spelled as OpenAI spelled it, "bytes:\\xe2\\x80". If the names of two tokens still are the same, the one that was not
drawn becomes "token_id:7".
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ridgeline.serving.http.shapes import best, finite
from ridgeline.text.outputs import CompletionOutput, TokenIdLogprobs
from ridgeline.text.token_stream import EACH_BYTE
from ridgeline.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_Row = tuple[str, float | None, dict[str, float] | None, int]


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
        echo: tuple[str, Sequence[int], Sequence[TokenIdLogprobs | None]] | None = None,
    ) -> None:
        self._tokenizer, self._top, self._by_id = tokenizer, top, by_id
        self._told = 0
        text, ids, entries = echo or ("", (), ())
        self._before = len(text)
        self._offsets = Offsets(tokenizer, len(text), hidden=hidden, bare=bare and not text)
        self._waiting: list[_Row] = []
        if ids:
            self._add(ids, entries, _places_in(text, ids, tokenizer))

    def take(self, output: CompletionOutput, *, shown: bool = True) -> dict[str, list[Any]]:
        """Return what was not returned before. A token that lies behind the text so far waits for it, or until the
        output ends. With shown=False the output counts as empty."""
        text = ""
        if shown and output.logprobs is not None:
            text, start, self._told = output.text, self._told, len(output.logprobs)
            ids = output.token_ids[start : self._told]
            self._add(ids, output.logprobs[start:], [self._offsets.place(token_id) for token_id in ids])
        end, rows = self._before + len(text), self._waiting
        certain = len(rows)
        if shown and not output.finished:
            certain = next((n for n, row in enumerate(rows) if row[-1] > end), certain)
        self._waiting = rows[certain:]
        columns = list(zip(*rows[:certain], strict=True)) or [()] * len(NAMES)
        found = {name: list(column) for name, column in zip(NAMES, columns, strict=True)}
        return found | {"text_offset": [min(place, end) for place in found["text_offset"]]}

    def _add(self, ids: Sequence[int], entries: Sequence[TokenIdLogprobs | None], places: Sequence[int]) -> None:
        for token_id, entry, place in zip(ids, entries, places, strict=True):
            name = self._name(token_id)
            if entry is None:  # nothing predicts the first token of a prompt
                self._waiting.append((name, None, None, place))
            else:
                self._waiting.append((name, finite(entry[token_id].logprob), self._by_name(entry, token_id), place))

    def _by_name(self, entry: TokenIdLogprobs, chosen: int) -> dict[str, float]:
        """Return the logprobs of the likeliest tokens and the chosen one, by different names."""
        taken, found = self._name(chosen), dict[str, float]()
        for token_id, each in (*best(entry, self._top), (chosen, entry[chosen])):
            name = self._name(token_id)
            if token_id != chosen and (name == taken or name in found):
                name = f"token_id:{token_id}"
            found[name] = finite(each.logprob)
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
