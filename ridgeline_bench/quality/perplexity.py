"""Perplexity of files, and bits per byte, which compare between models whatever their tokenizers.

A document is read behind the model's prefix token (BOS, else EOS) in overlapping windows, and every token of it is
scored once (`text/windows.py`). The end of a document is not scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.llm import LLM
from ridgeline.text.outputs import TokenIdLogprobs
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.windows import Window
from ridgeline_bench.quality.documents import TextFile
from ridgeline_bench.quality.likelihood import Cut, prefix_token, prompt_logprobs

Seen = Callable[[Sequence[int], Sequence[TokenIdLogprobs]], object]


@dataclass(frozen=True)
class TextScore:
    """The information (in nats) in `num_bytes` bytes of text, written as `num_tokens` tokens, and the seconds it took
    to read.

    `exact` says that the tokenizer gives every text back. If it does not, fewer bytes than those counted may have been
    scored.
    """

    name: str
    nats: float
    num_tokens: int
    num_bytes: int
    num_documents: int
    seconds: float
    exact: bool = True

    @classmethod
    def together(cls, scores: Sequence[TextScore]) -> TextScore:
        return cls(
            "together",
            math.fsum(s.nats for s in scores),
            sum(s.num_tokens for s in scores),
            sum(s.num_bytes for s in scores),
            sum(s.num_documents for s in scores),
            math.fsum(s.seconds for s in scores),
            all(s.exact for s in scores),
        )

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The perplexity, which is infinite if a token was held impossible or the value is beyond a float."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(1e-9, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.name,
            "perplexity": self.perplexity,
            "nats_per_token": self.nats_per_token,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "documents": self.num_documents,
            "tokens_per_second": self.tokens_per_second,
            "exact_tokenizer": self.exact,
        }


@dataclass(frozen=True)
class Piece:
    """One window of one document: the tokens to run, and which of them it scores."""

    document: int
    tokens: list[int]
    window: Window

    @property
    def scored(self) -> slice:
        """The part of the answer of `prompt_logprobs` to `tokens` that is scored. The answer begins with the second
        token."""
        return slice(self.window.scored - self.window.start - 1, None)


class Reading:
    """A file as one model's tokens, each document behind the prefix token, cut into windows.

    Raise InvalidConfig for a file without tokens.
    """

    def __init__(self, file: TextFile, tokenizer: Tokenizer, prefix: int, cut: Cut) -> None:
        self.file = file
        self.cut = cut
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in file.documents]
        self.exact = all(
            tokenizer.decode(ids, skip_special_tokens=False) == text
            for text, ids in zip(file.documents, encoded, strict=True)
        )
        self.documents = [[prefix, *ids] for ids in encoded]
        self.num_tokens = sum(map(len, encoded))
        if not self.num_tokens:
            raise InvalidConfig(f"the model's tokenizer finds no tokens in {file.path}; leave it out.")

    @classmethod
    def of(cls, llm: LLM, file: TextFile, cut: Cut) -> Reading:
        tokenizer = llm.get_tokenizer()
        return cls(file, tokenizer, prefix_token(llm.assembly.model, tokenizer), cut)

    def pieces(self) -> Iterator[Piece]:
        for number, tokens in enumerate(self.documents):
            for window in self.cut(len(tokens)):
                yield Piece(number, tokens[window.start : window.end], window)

    def prompts(self) -> Iterator[list[int]]:
        return (piece.tokens for piece in self.pieces())


def perplexity(llm: LLM, reading: Reading, *, top: int = 0, seen: Seen = lambda tokens, entries: None) -> TextScore:
    """Score one file. Every few scored tokens `seen` gets them and the model's answer on them and the `top` likeliest.

    Raise EvaluationFailed.
    """
    started = time.perf_counter()
    nats = []
    for piece, entries in zip(reading.pieces(), prompt_logprobs(llm, reading.prompts(), top=top), strict=True):
        tokens, entries = piece.tokens[1:][piece.scored], entries[piece.scored]
        nats += [-entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
        seen(tokens, entries)
    file = reading.file
    return TextScore(
        str(file.path),
        math.fsum(nats),  # exact, so the order of the windows does not matter
        reading.num_tokens,
        file.num_bytes,
        len(file.documents),
        time.perf_counter() - started,
        reading.exact,
    )
