"""Token ids to text, one at a time."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from ridgeline.text.tokenizer import Tokenizer, fallback_byte

REPLACEMENT = "\ufffd"
WINDOW = 4


class TokenStream:
    """Turns one sequence's tokens into pieces of text that join to what decoding all of them at once gives.

    The text of a token depends on its neighbours: a leading space is dropped only at the very start, and a
    character may be spread over tokens. So each step decodes a short window that ends with the new token, and
    gives out what goes beyond the text already given. Three rules make that exact:

    * A window keeps at least WINDOW tokens that have text. UTF-8 finds its way back within four bytes, and nothing
      but the first token of a text loses its leading space.
    * A replacement character at the end is held back: it may be half a character. One is enough, since half
      a character decodes to exactly one.
    * A run of byte-fallback tokens is held back until it ends: decoders turn the whole run into replacement
      characters if any part of it is not valid.

    `tokenizers.decoders.DecodeStream` lacks the third rule (it raises "Invalid prefix encountered" and loses text)
    and holds back everything for as long as the text ends with a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids = self._context(prompt_ids)
        self._shown = self._decode()
        self._held = False

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "" in the middle of a character."""
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        self._held = True
        return "" if self._is_byte(token_id) else self._give(self._decode(), final=False)

    def finish(self) -> str:
        """What was held back, as it stands."""
        return self._give(self._decode(), final=True) if self._held else ""

    def _give(self, text: str, *, final: bool) -> str:
        self._held = not final and text.endswith(REPLACEMENT)
        certain = text[:-1] if self._held else text
        start = len(self._shown)
        if not certain.startswith(self._shown):
            # Only where the prompt ended in half a character or an open run of bytes.
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
        """The prompt's last WINDOW tokens with text, and all of the run of bytes it may end in."""
        context: list[int] = []
        beyond_run = 0
        for token_id in reversed(prompt_ids):
            if not self._has_text(token_id):
                continue
            context.append(token_id)
            if beyond_run or not self._is_byte(token_id):
                beyond_run += 1
            if beyond_run == WINDOW:
                break
        return context[::-1]

    def _has_text(self, token_id: int) -> bool:
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return False
        return self._tokenizer.token_string(token_id) != ""

    def _is_byte(self, token_id: int) -> bool:
        tokenizer = self._tokenizer
        return tokenizer.uses_byte_fallback and fallback_byte(tokenizer.token_string(token_id)) is not None

    def _decode(self) -> str:
        return self._tokenizer.backend.decode(self._ids, skip_special_tokens=self._skip_special)
