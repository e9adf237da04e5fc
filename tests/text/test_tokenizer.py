"""The tokenizer equals transformers' on the same folder, and says what is wrong with a folder or a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from transformers import AutoTokenizer

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.text.tokenizer import Tokenizer, fallback_byte, reraise_unless_failed
from tests.text.sample_tokenizers import byte_level, write_folder

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces\n\ttab",
    "Größe café 👋🏽 你好 \x00",
    "<s>a <|im_start|>user</s><tool_call> é!",
]


def both(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


def assert_equal(ours: Tokenizer, oracle: Any) -> None:
    assert ours.vocab_size == len(oracle)
    assert ours.special_tokens == oracle.special_tokens_map
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == oracle.encode(text, add_special_tokens=add)
        ids = oracle.encode(text)
        assert ours.convert_ids_to_tokens(ids) == oracle.convert_ids_to_tokens(ids)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_each_family_equals_transformers(folders: dict[str, Path], family: str) -> None:
    assert_equal(*both(folders[family]))


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("processor", [True, False])
def test_bos_follows_the_post_processor_alone(tmp_path: Path, add_bos: bool, processor: bool) -> None:
    backend = byte_level()
    if not processor:
        spec = json.loads(backend.to_str())
        backend = type(backend).from_str(json.dumps(spec | {"post_processor": None}))
    ours, oracle = both(write_folder(tmp_path, backend, add_bos_token=add_bos, add_eos_token=add_bos))
    assert_equal(ours, oracle)
    assert (ours.encode("x")[0] == ours.bos_id) == processor


def test_tokens_named_only_in_config_files_are_added(tmp_path: Path) -> None:
    spelled = AddedToken("<think>", normalized=False).__getstate__()
    folder = write_folder(
        tmp_path,
        byte_level(),
        pad_token="<pad>",
        image_token="<image>",
        added_tokens_decoder={"441": spelled, "442": spelled | {"content": "<turn>", "special": True}},
    )
    ours, oracle = both(folder)
    assert_equal(ours, oracle)
    text = "a<think>b<turn><pad><image>"
    assert ours.encode(text) == oracle.encode(text)
    assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text), skip_special_tokens=True) == "a<think>b"


def test_older_folders_name_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "additional_special_tokens": ["<extra>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    ours, oracle = both(folder)
    assert_equal(ours, oracle)
    assert ours.encode("<extra>") == oracle.encode("<extra>")
    assert ours.eos_ids == {oracle.eos_token_id} == {4}


def test_split_special_tokens_reads_them_as_plain_text(tmp_path: Path) -> None:
    assert_equal(*both(write_folder(tmp_path, byte_level(), split_special_tokens=True)))


def test_padding_and_truncation_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_padding(length=64)
    backend.enable_truncation(max_length=3)
    ours, oracle = both(write_folder(tmp_path, backend))
    assert ours.encode("a long enough prompt") == oracle.encode("a long enough prompt")
    assert len(ours.encode("a long enough prompt")) > 3


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens_decoder": {"x": 1}}', '{"added_tokens_decoder": [1]}'])
def test_a_damaged_config_file_is_named(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["\ud800", "ok \udc80 no", b"bytes", None, 7, ["list"]])
def test_what_is_not_text_is_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([-1, 10**6, 2**32, 2**70]) == ""
    inside = [0, tokenizer.vocab_size - 1]
    assert tokenizer.decode([-1, *inside, 2**32], False) == tokenizer.decode(inside, False) != ""
    assert tokenizer.convert_ids_to_tokens([-1, 2**70]) == ["", ""]
    assert tokenizer.token_bytes(-1) == b""


@given(text=st.text())
def test_token_bytes_join_to_the_text(byte_level_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(byte_level_tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_token_bytes_of_fallback_bytes_and_spaces(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode(" é", add_special_tokens=False)
    assert b"".join(byte_fallback_tokenizer.token_bytes(i) for i in ids) == "  é".encode()
    assert [fallback_byte(t) for t in ("<0xE2>", "<0xe2>", "<0xZZ>", "<0xE2", "a")] == [0xE2, 0xE2, None, None, None]


@pytest.mark.parametrize(
    "token",
    ["<0x41>", "<0x4f>", "<0x+1>", "<0x-1>", "<0x 1>", "<0x4_>", "<0x\u0663\u0661>", "<0x4>", "<0x041>", "<0x>"],
)
def test_a_token_is_a_byte_where_the_library_says_so(token: str) -> None:
    theirs = decoders.ByteFallback().decode([token])
    byte = fallback_byte(token)
    assert theirs == (token if byte is None else chr(byte))


def test_special_ids_are_what_decoding_skips(tokenizer: Tokenizer) -> None:
    assert {"<s>", "</s>", "<|im_end|>"} <= set(tokenizer.convert_ids_to_tokens(sorted(tokenizer.special_ids)))
    assert tokenizer.decode(sorted(tokenizer.special_ids)) == ""


def test_only_the_librarys_own_failures_are_taken_for_such() -> None:
    class Leave(BaseException):
        """Of some framework, as trio's Cancelled is."""

    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for failure in (ValueError("no"), panic("index out of range")):
        reraise_unless_failed(failure)
    for other in (Leave(), KeyboardInterrupt(), SystemExit(2)):
        with pytest.raises(type(other)):
            reraise_unless_failed(other)


class Counting:
    """A backend that counts the characters that it tokenizes."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.characters = backend, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not name.startswith("encode"):
            return found

        def counted(texts: str | list[str], **options: Any) -> Any:
            self.characters += len("".join(texts))
            return found(texts, **options)

        return counted


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_text_that_is_cut_is_not_tokenized_whole(
    folders: dict[str, Path], family: str, side: Literal["left", "right"]
) -> None:
    ours, oracle = both(folders[family])
    backend = ours.backend = Counting(ours.backend)
    words = [f"Größe {number} hello 👋🏽 " for number in range(20_000)]
    runs = ["x" * 200_000, "<s>" * 50_000, "a" + " " * 200_000 + "b"]
    for text in ("".join(words), *runs):
        backend.characters = 0
        ids, _ = ours.encode_within(text, None, 50, add_special_tokens=False, side=side)
        whole = oracle.encode(text, add_special_tokens=False)
        if side == "left" and text in runs:  # tokens of one endless word may begin elsewhere
            assert len(ids) == 50
        else:
            assert ids == (whole[:50] if side == "right" else whole[-50:])
        assert backend.characters < 20_000 or len(whole) < 200, "it was read as a whole"
        backend.characters = 0
        if side == "right":
            kept = ours.beginning(text, 7)
            assert text.startswith(kept)
            assert oracle.encode(kept, add_special_tokens=False)[:6] == whole[:6]
            assert backend.characters < 20_000 or len(whole) < 200
