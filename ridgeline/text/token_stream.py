"""Conversion of token ids to text, one token at a time."""

from __future__ import annotations

import codecs
import os.path
from collections.abc import Sequence
from itertools import islice

from ridgeline.text.tokenizer import Tokenizer, fallback_byte

REPLACEMENT = "\ufffd"
WINDOW = 4
EACH_BYTE = "each byte replaced"  # how a run of byte-fallback tokens is read that is no UTF-8

codecs.register_error(
    EACH_BYTE,
    lambda error: (REPLACEMENT * (error.end - error.start), error.end),  # type: ignore[attr-defined]
)
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenStream:
    """A stream that turns one sequence's tokens into pieces of text. Joined, they equal the decoding of all tokens at
    once.

    The text of a token depends on its neighbours: a leading space is dropped only at the very start, and a character
    may be spread over tokens. So each step decodes a short window that ends with the new token, and releases the part
    beyond the text that it has already released. Three rules make this exact:

      * A window keeps at least WINDOW tokens that have text. Within four bytes UTF-8 decodes correctly again, and only
        the first token of a text loses its leading space.
      * A replacement character at the end is held back, because it may be half a character. Holding back one is enough,
        since half a character decodes to exactly one.
      * A run of byte-fallback tokens is read as UTF-8 byte by byte. A character is text as soon as it is complete, and
        a byte that belongs to none becomes a replacement character. Decoding all at once gives the same if the run is
        valid. If it is not, the library replaces even its valid characters, some of which have been released by then.

    Special tokens have no text with `skip_special_tokens`, those in `shown` excepted.

    `tokenizers.decoders.DecodeStream` lacks the third rule: it raises "Invalid prefix encountered" and loses text. It
    also holds back everything for as long as the text ends with a replacement character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._ids = self._context(prompt_ids)
        self._shown = self._decode()
        self._held = False
        self._run = _Utf8Decoder(EACH_BYTE) if tokenizer.uses_byte_fallback else None
        self._in_run = self._at_start = False
        self._half = ""  # what the prompt shows of a character that begins in its last bytes
        if self._run is not None and self._ids:
            self._continue(self._run)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now and was not before. In the middle of a character that is
        ""."""
        spelled = self._spelled(token_id)
        if not spelled:
            return ""
        byte = None if self._run is None else fallback_byte(spelled)
        if byte is not None:
            return self._push_byte(token_id, byte)
        piece = self._end_run() if self._in_run else ""
        self._ids.append(token_id)
        self._held = True
        return piece + self._give(self._decode(), final=False)

    def finish(self) -> str:
        """Return the text that was held back, as it stands."""
        if self._in_run:
            return self._end_run()
        return self._give(self._decode(), final=True) if self._held else ""

    def _push_byte(self, token_id: int, byte: int) -> str:
        assert self._run is not None
        piece = self._give(self._decode(), final=True) if self._held else ""
        if not self._in_run:
            self._in_run, self._at_start = True, not self._ids
        self._ids.append(token_id)
        text = self._run.decode(bytes([byte]))
        if self._at_start and text:  # the library drops a leading space here
            self._at_start = False
            text = text if REPLACEMENT in text else self._decode()
        if len(self._ids) >= 2 * WINDOW:
            del self._ids[:-WINDOW]
        return piece + self._beyond_half(text)

    def _end_run(self) -> str:
        """End the run of bytes and return the half character that is left. The text that follows is decoded with the
        run's last tokens before it."""
        assert self._run is not None
        piece = self._beyond_half(self._run.decode(b"", final=True))
        self._in_run = False
        self._shown = self._decode()
        return piece

    def _continue(self, run: codecs.IncrementalDecoder) -> None:
        """Continue the run of bytes with which the prompt may end. Its last bytes may begin a character."""
        for token_id in self._ids:
            byte = fallback_byte(self._spelled(token_id))
            self._in_run = byte is not None
            run.decode(b"" if byte is None else bytes([byte]), final=byte is None)
        self._half = REPLACEMENT * len(run.getstate()[0])

    def _beyond_half(self, text: str) -> str:
        """Return the text without the replacement characters that already end the prompt."""
        if not text or not self._half:
            return text
        known = len(os.path.commonprefix((self._half, text)))  # noqa: RUF071  (characters are meant)
        self._half = ""
        return text[known:]

    def _give(self, text: str, *, final: bool) -> str:
        self._held = not final and text.endswith(REPLACEMENT)
        certain = text[:-1] if self._held else text
        start = len(self._shown)
        if not certain.startswith(self._shown):
            # This happens only if the prompt ended in half a character.
            start = len(os.path.commonprefix((self._shown, certain)))  # noqa: RUF071  (characters are meant)
        if len(certain) <= start:
            return ""
        self._shown = certain
        piece = certain[start:]
        if len(self._ids) >= 2 * WINDOW:
            self._shrink()
        return piece

    def _shrink(self) -> None:
        del self._ids[:-WINDOW]
        text = self._decode()
        self._shown = text[:-1] if self._held else text

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last WINDOW tokens with text."""
        found = (token_id for token_id in reversed(prompt_ids) if self._spelled(token_id))
        return list(islice(found, WINDOW))[::-1]

    def _spelled(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; "" for one without text."""
        if token_id in self._hidden:
            return ""
        return self._tokenizer.token_string(token_id)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)  # none of them is hidden
