"""Conversion of text to token ids and back, for one model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, normalizers

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.text.arguments import short
from ridgeline.text.byte_level import byte_level_alphabet
from ridgeline.text.components import check_text, with_runs_tried_once
from ridgeline.text.gguf_tokenizer import gguf_tokenizer
from ridgeline.text.sentencepiece_tokenizer import sentencepiece_backend
from ridgeline.text.tekken_tokenizer import NAMED, TEKKEN, tekken_backend
from ridgeline.text.tiktoken_tokenizer import add_reserved_tokens, tiktoken_backend
from ridgeline.weights.formats.gguf_file import is_gguf, read_gguf
from ridgeline.weights.formats.json_file import bounded_text, read_json
from ridgeline.weights.formats.sentencepiece_file import read_sentencepiece
from ridgeline.weights.modules import drops_punctuation, lowers_case

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", TEKKEN)  # the first that is there counts
PROBE = "The 1st\t<s>\n é 🎃"  # every tokenizer is tried on this when it is loaded
# From this many characters or tokens on the library gets a batch of one, because only during batches does it let other
# threads have the interpreter.
ALONE = 4096
# Of a text that is cut so many characters for each token that is kept are read first, and so many tokens more, in which
# the end of what is read changes nothing that is kept.
CHARS, SPARE = 8, 64
WORD = re.compile(r"(?<=\S)\s")
BYTE = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # as the library reads it, which accepts a sign for a digit
# Texts without ASCII's punctuation, and with one space between words, as SigLIP was trained on
BARE = (
    normalizers.Replace(tokenizers.Regex("[!-/:-@\\[-`{-~]"), ""),
    normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
    normalizers.Strip(),
)
MOST_SPELLED = 1 << 16  # spellings of tokens that are kept
MAX_ID = 2**32 - 1  # the library's id type; it raises on anything beyond


class Tokenizer:
    """The tokenizer of a model folder: `tokenizer.json`, `tokenizer.model`, `tiktoken.model` or `tekken.json`, and the
    special tokens of its config files.

    It equals transformers' `AutoTokenizer` on the same folder. As there, the post-processor in tokenizer.json alone
    decides if a prompt begins with BOS; `add_bos_token` in tokenizer_config.json does not count beside it.
    `clean_up_tokenization_spaces` is not followed, because it alters text after decoding and cannot be streamed.

    `backend` is the `tokenizers` object. `special_tokens` (name → text: "bos_token" → "<s>") are what chat templates
    see. `special_ids` are left out of text if special tokens are skipped. `eos_ids` holds the eos_token's id; the
    model's own config may name more. `uses_byte_fallback` says that tokens such as <0xE2> stand for single bytes.
    `kind` is the class in transformers that the folder names.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], kind: str = "PreTrainedTokenizerFast"
    ) -> None:
        # A tokenizer.json may carry the padding and truncation of its training run; a prompt wants neither.
        backend.no_padding()
        backend.no_truncation()
        self.backend, self.kind = backend, kind
        self.special_tokens = dict(special_tokens)
        self.bos_id = self._named_id("bos_token")
        eos_id = self._named_id("eos_token")
        self.eos_ids: frozenset[int] = frozenset() if eos_id is None else frozenset({eos_id})
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.added = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        kinds = _decoder_kinds(backend)
        self.uses_byte_fallback = "ByteFallback" in kinds
        self._byte_alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._spelled: dict[int, tuple[str, bool]] = {}
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder or a GGUF file. Raise ModelLoadError that names the missing or damaged
        file."""
        try:
            tokenizer = cls._read(Path(folder))
            with suppress(Exception):  # it need not know this text, but it must not panic
                tokenizer.backend.decode(tokenizer.backend.encode(PROBE).ids, skip_special_tokens=False)
        except ModelLoadError:
            raise
        except BaseException as error:
            reraise_unless_failed(error)
            raise ModelLoadError(
                f"the tokenizer in {folder} cannot be used ({error}); copy its files again from where it came from."
            ) from error
        return tokenizer

    @classmethod
    def _read(cls, folder: Path) -> Tokenizer:
        if is_gguf(folder):
            return cls(*gguf_tokenizer(read_gguf(folder)))
        config = read_json(folder / "tokenizer_config.json")
        file = next((name for name in FILES if (folder / name).is_file()), FILES[0])
        if file == "tokenizer.model":
            model = read_sentencepiece(folder / file)
            backend = sentencepiece_backend(model, **_framing(config))
            config = {f"{name}_token": model.pieces[i].text for name, i in model.ids.items()} | config
        elif file == "tiktoken.model":
            backend = tiktoken_backend(folder, config)
        elif file == TEKKEN:
            backend = tekken_backend(folder)
            config = NAMED | config
        else:
            backend = _load_backend(folder / file)
        if "added_tokens_decoder" not in config:  # older folders keep the names in a file of their own
            config |= read_json(folder / "special_tokens_map.json")
        if lowers_case(folder):
            rest = [] if backend.normalizer is None else [backend.normalizer]
            first = [normalizers.Lowercase(), *(BARE if drops_punctuation(folder) else ())]
            backend.normalizer = normalizers.Sequence([*first, *rest])
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        try:
            if file == "tiktoken.model":
                add_reserved_tokens(backend, folder, config)
            named = _named_special_tokens(config)
            backend.add_tokens(_missing_tokens(backend, config, named))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"the special tokens in {folder}/tokenizer_config.json cannot be read ({error})"
            raise ModelLoadError(f"{message}; copy the file again from where the model came from.") from error
        special, kind = {name: str(token) for name, token in named.items()}, config.get("tokenizer_class")
        return cls(backend, special, kind) if kind and isinstance(kind, str) else cls(backend, special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raise InvalidRequest for text that UTF-8 cannot hold (a lone surrogate)."""
        if not isinstance(text, str):
            raise InvalidRequest(f"the prompt must be a string, got {type(text).__name__}.", param="prompt")
        try:
            if len(text) <= ALONE:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            reraise_unless_failed(error)
            raise InvalidRequest(_why_not_encoded(text, error), param="prompt") from error

    def encode_within(
        self,
        text: str,
        second: str | None,
        room: int | None,
        *,
        add_special_tokens: bool = True,
        side: Literal["left", "right"] = "right",
    ) -> tuple[list[int], int]:
        """Return the token ids of a text, or of two as the tokenizer joins them, and the first one of the second text
        (0: the tokenizer does not tell them apart). Raise InvalidRequest as `encode`.

        room: no more tokens than that, special ones included. Texts lose their ends (or, with the side "left", their
            beginnings), and of two the longer one first.
        """
        texts = [each for each in (text, second) if each is not None]
        try:
            if room is not None:
                texts = [self._needed(each, room, side) for each in texts]
            first_of, *others = self.backend.encode_batch(texts, add_special_tokens=False)
            second_of = others[0] if others else None
            if room is not None:
                special = self.backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
                lengths = _cut_to(room - special, len(first_of.ids), 0 if second_of is None else len(second_of.ids))
                for encoding, length in zip((first_of, second_of), lengths, strict=True):
                    if encoding is not None:
                        encoding.truncate(length, direction=side)
            joined = self.backend.post_process(first_of, second_of, add_special_tokens=add_special_tokens)
        except InvalidRequest:
            raise
        except BaseException as error:
            reraise_unless_failed(error)
            raise InvalidRequest(_why_not_encoded(text, error), param="prompt") from error
        types = joined.type_ids
        return joined.ids, types.index(1) if second is not None and 1 in types else 0

    def beginning(self, text: str, most: int) -> str:
        """Return the part of a text that its first `most` tokens were made from. Raise InvalidRequest as `encode`."""
        try:
            encoding = self.backend.encode_batch([self._needed(text, most, "right")], add_special_tokens=False)[0]
        except BaseException as error:
            reraise_unless_failed(error)
            raise InvalidRequest(_why_not_encoded(text, error), param="prompt") from error
        return text if len(encoding.ids) <= most else text[: encoding.offsets[most - 1][1]]

    def _needed(self, text: str, most: int, side: Literal["left", "right"]) -> str:
        """Return the part of a text that its first `most` tokens (with the side "left" its last ones) are made from,
        and some more. A few tokens of a long text cost no more than those of a short one. Last tokens are those of the
        whole text where a word begins in the part."""
        size = CHARS * (most + SPARE)
        while size < len(text):
            part = text[:size] if side == "right" else text[-size:]
            if side == "left" and (begin := WORD.search(part)):
                part = part[begin.start() :]
            if len(self.backend.encode_batch_fast([part], add_special_tokens=False)[0].ids) >= most + SPARE:
                return part
            size *= 4
        return text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        found = self.backend.token_to_id(token)
        return found if found is not None or token == token.strip() else self.backend.token_to_id(token.strip())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids outside the vocabulary have none.

        Raise InvalidRequest if the tokenizer fails on them, which a damaged one may.
        """
        try:
            if len(ids) <= ALONE:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError:  # raised beyond the library's id type
            return self.decode([i for i in ids if 0 <= i <= MAX_ID], skip_special_tokens)
        except BaseException as error:
            reraise_unless_failed(error)
            raise InvalidRequest(
                f"the model's tokenizer fails on the tokens {short(ids)} ({error}); its files may be damaged."
            ) from error

    def token_string(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it ("Ġthe", "▁the", "<0xE2>"); "" for an unknown id."""
        if not 0 <= token_id <= MAX_ID:
            return ""
        return self.backend.id_to_token(token_id) or ""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.token_string(i) for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text. For some tokens that is half a
        character."""
        token = self.token_string(token_id)
        if self._byte_alphabet is not None:
            # A character outside the alphabet means an added token, whose spelling is its text.
            known = all(char in self._byte_alphabet for char in token)
            return bytes(self._byte_alphabet[char] for char in token) if known else token.encode()
        if self.uses_byte_fallback and (byte := fallback_byte(token)) is not None:
            return bytes([byte])
        return token.replace("▁", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Return the text that `decode` gives for one token alone. Equal tokens have the same object."""
        found = self._texts.get(token_id)
        if found is None:
            if len(self._texts) >= MOST_SPELLED:
                self._texts.clear()
            found = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return found

    def spelled(self, token_id: int) -> tuple[str, bool]:
        """Return a token's text in the middle of a text, and True. A token that is no text by itself, such as half a
        character, is spelled by its bytes ("\\xe2\\x80"), with False. An id without a token has no text."""
        found = self._spelled.get(token_id)
        if found is None:
            if len(self._spelled) >= MOST_SPELLED:
                self._spelled.clear()
            found = self._spelled[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> tuple[str, bool]:
        data = self.token_bytes(token_id)
        try:
            return data.decode(), True
        except UnicodeDecodeError:
            return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data), False

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _cut_to(room: int, first: int, second: int) -> tuple[int, int]:
    """Return the numbers of tokens of two texts that remain. Raise InvalidRequest if none fits."""
    if room < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens leaves no room beside the special tokens; raise it.", param="truncate_prompt_tokens"
        )
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if shorter > room // 2:
        shorter = room // 2
    longer = room - shorter
    return (longer, shorter) if first >= second else (shorter, longer)


def fallback_byte(token: str) -> int | None:
    """Return 0xE2 for "<0xE2>", and None for a token that is not of this form."""
    found = BYTE.fullmatch(token)
    return None if found is None else int(found[1], 16)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelLoadError(
            f"{path} is missing; copy it from the model's source, or write it with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    try:
        text = bounded_text(path)
        check_text(text)
        return tokenizers.Tokenizer.from_str(with_runs_tried_once(text))
    except ModelLoadError:
        raise
    except BaseException as error:  # the library raises plain Exception, or panics
        reraise_unless_failed(error)
        raise ModelLoadError(f"{path} cannot be read ({error}); copy it again from the model's source.") from error


def _framing(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return the flags for BOS and EOS around prompts of a `tokenizer.model`: tokenizer_config.json's, or else
    Llama's."""
    defaults = {"add_bos_token": True, "add_eos_token": False, "legacy": False}
    found = {
        name: config[name] if isinstance(config.get(name), bool) else default for name, default in defaults.items()
    }
    return {"add_bos": found["add_bos_token"], "add_eos": found["add_eos_token"], "prefix_each": found["legacy"]}


def _as_added_token(value: object) -> AddedToken | None:
    """Return a token of a config file, which spells it as text or as an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and "content" in value:
        flags = {k: v for k, v in value.items() if k in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(value["content"], special=True, **flags)
    return None


def _named_special_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the special tokens by name: the seven standard ones, and any other `<something>_token` that a model
    brings."""
    entries = {k: v for k, v in config.items() if k in STANDARD_NAMES or k.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        entries |= extra
    tokens = {name: _as_added_token(value) for name, value in entries.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> list[AddedToken]:
    """Return the tokens that the config files know and tokenizer.json does not, or knows with other flags, by id."""
    held = {str(token): token for token in backend.get_added_tokens_decoder().values()}
    spelled = config.get("added_tokens_decoder", {})
    listed = [AddedToken(**spelled[i]) for i in sorted(spelled, key=int)]
    missing = [token for token in listed if held.get(str(token)) != token]
    texts = {str(token) for token in (*held, *missing)}
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    unnamed = [_as_added_token(value) for value in extra] if isinstance(extra, list) else []
    for token in (*named.values(), *unnamed):
        if token is not None and str(token) not in texts:
            missing.append(token)
            texts.add(str(token))
    return missing


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the names of the steps of the tokenizer's decoder."""
    if backend.decoder is None:
        return set()
    spec = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in spec.get("decoders", [spec])}


def reraise_unless_failed(error: BaseException) -> None:
    """Raise the error again if it is no failure of the library: Ctrl-C, the end of the process.

    A panic in the library's Rust code arrives as a class that derives from BaseException and has no name to import it
    by.
    """
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error


def _why_not_encoded(text: str, error: BaseException) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as invalid:
        return f"the prompt is not valid text: character {invalid.start} is a lone surrogate ({text[invalid.start]!r})."
    return f"the model's tokenizer cannot encode this text ({error}); change it, or the model's tokenizer files."
