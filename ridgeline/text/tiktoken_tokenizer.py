"""A tiktoken vocabulary as a `tokenizers` object, which gives the same ids for the same text.

tiktoken has no list of merges: it joins the neighbours whose union has the lowest rank, the leftmost first. A token's
last two parts are the same in every text: until they join, no merge crosses the token's ends, and its inside merges in
the same order. So each token has one merge, found by encoding the token alone. Merges in the order of their tokens'
ranks give the same result as the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.arguments import short
from ridgeline.text.byte_level import byte_level_alphabet
from ridgeline.weights.formats.tiktoken_file import read_tiktoken

RESERVED = 256  # ids behind the vocabulary, which are special tokens
MAX_RESERVED = 4096  # Kimi-Linear's config lists a few beyond the 256

# How Kimi cuts text into words: runs of Han characters, words of other letters with the character before them and an
# English ending, up to three digits, the rest, spaces. Letters are those of words that begin in upper case and those
# that go on in lower case; most scripts' letters are both.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
KIMI_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The file does not say how text is cut, but code beside it, which is never run. So this goes by its class.
_WORDS = {"TikTokenTokenizer": KIMI_WORDS}

_NEVER = 1 << 62  # the rank of two neighbours whose union is no token


def tiktoken_backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a backend that is equal to tiktoken's encoder with the folder's `tiktoken.model`, without special tokens.
    Raise ModelLoadError for a damaged file, and if the config names a class whose words we do not know."""
    words = _WORDS.get(name := str(config.get("tokenizer_class")))
    if words is None:
        raise ModelLoadError(
            f"{folder} has a tiktoken.model for the tokenizer class {short(name)}, whose way to cut text into words we "
            f"do not know (known: {', '.join(_WORDS)}); put a tokenizer.json beside it."
        )
    return byte_level_backend(read_tiktoken(folder / "tiktoken.model"), words, [])


def byte_level_backend(tokens: Sequence[bytes], words: str, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a backend with these tokens in the order of their ranks. words: the regular expression that cuts text.
    special: texts of the tokens with the first ids, before those of rank 0 and on."""
    characters = {byte: char for char, byte in byte_level_alphabet().items()}
    spelled = ["".join(characters[byte] for byte in token) for token in tokens]
    vocab = {text: number for number, text in enumerate([*special, *spelled])}
    vocab |= {text: number for number, text in enumerate(special)}  # where a plain token spells a special one
    merges = [(text[:cut], text[cut:]) for text, cut in zip(spelled, _cuts(tokens), strict=True) if cut]
    # A word that is a token as a whole is that token, even if no merges lead there.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(words), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    backend.decoder = decoders.ByteLevel()
    return backend


def add_reserved_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the special tokens, whose ids follow the vocabulary's: those that the config lists, and others named by
    their ids. Raise ModelLoadError if these ids are not free for them, and as AddedToken does for odd fields."""
    size = backend.get_vocab_size()
    listed = {int(i): AddedToken(**fields) for i, fields in config.get("added_tokens_decoder", {}).items()}
    if odd := [i for i in listed if not size <= i < size + MAX_RESERVED]:
        raise ModelLoadError(
            f"{folder}/tokenizer_config.json lists the special token {odd[0]}, and tiktoken.model leaves the ids from "
            f"{size} to {size + MAX_RESERVED - 1} free; copy both again from the model's source."
        )
    ids = range(size, max(size + RESERVED, max(listed, default=0) + 1))
    special = [listed.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True, normalized=False) for i in ids]
    backend.add_tokens(special)
    for i, token in zip(ids, special, strict=True):
        if backend.token_to_id(token.content) != i:  # the library gives no second id to a text that has one
            raise ModelLoadError(
                f"the special token {i} in {folder} has no name of its own ({short(token.content)}); copy "
                "tokenizer_config.json and tiktoken.model again from the model's source."
            )


def _cuts(tokens: Sequence[bytes]) -> list[int]:
    """Return the position at which each token's last merge joins it; 0 for single bytes and for tokens that merges do
    not lead to."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return [_cut(token, ranks) for token in tokens]


def _cut(token: bytes, ranks: Mapping[bytes, int]) -> int:
    starts = list(range(len(token) + 1))
    unions = [ranks.get(token[i : i + 2], _NEVER) for i in range(len(token) - 1)]
    while len(unions) > 1:
        lowest = min(unions)
        if lowest == _NEVER:
            return 0
        i = unions.index(lowest)
        del starts[i + 1], unions[i]
        if i > 0:
            unions[i - 1] = ranks.get(token[starts[i - 1] : starts[i + 1]], _NEVER)
        if i < len(unions):
            unions[i] = ranks.get(token[starts[i] : starts[i + 2]], _NEVER)
    return starts[1] if unions else 0
