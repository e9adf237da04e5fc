"""A tokenizer written to GGUF and read back gives the ids of the tokenizer that was written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ModelLoadError
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.tokenizer import Tokenizer
from tests import gguf_files, tiny_models
from tests.text.sample_tokenizers import CORPUS, SPECIALS

gguf = pytest.importorskip("gguf")

WORDS = st.sampled_from(
    [" ", "\n\n ", "12345", "'LL", "don't", "fibonacci(n)", "<|im_end|>", "<tool_call>", "é", "…)\r\n"]
)
TEXT = st.lists(WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=10).map("".join)


def write(path: Path, **values: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        gguf_files.add(writer, f"tokenizer.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def trained(way: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer that cuts words as the families do, by the patterns that transformers has for them."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=way == "llama-bpe"))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = TikTokenConverter().pattern
    match way:
        case "gpt-2":
            backend.pre_tokenizer = gpt2
        case "smollm":
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case "llama-bpe":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone]
            )
        case "qwen2":
            backend.normalizer = normalizers.NFC()
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(pattern.replace("{1,3}", "")), "isolated"), bytes_alone]
            )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", special=False, normalized=False)])
    return backend


def byte_level_values(backend: tokenizers.Tokenizer, way: str) -> dict[str, Any]:
    spec = json.loads(backend.to_str())
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    kinds = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    return {
        "ggml__model": "gpt2",
        "ggml__pre": way,
        "ggml__tokens": tokens,
        "ggml__token_type": [kinds.get(token, 1) for token in tokens],
        "ggml__merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "ggml__bos_token_id": backend.token_to_id("<s>"),
        "ggml__eos_token_id": backend.token_to_id("<|im_end|>"),
        "ggml__add_bos_token": True,
    }


@pytest.mark.parametrize("way", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_ids_and_text_are_the_original_s(way: str, tmp_path: Path) -> None:
    oracle = trained(way)
    ours = Tokenizer.from_folder(write(tmp_path / "x.gguf", **byte_level_values(oracle, way)))
    assert ours.vocab_size == oracle.get_vocab_size()
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert ours.encode("n")[0] == ours.bos_id == oracle.token_to_id("<s>")

    @settings(max_examples=150)
    @given(TEXT)
    def check(text: str) -> None:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("said", [True, False, None])
def test_sentencepiece_ids_are_sentencepiece_s(said: bool | None, tmp_path: Path) -> None:
    """said: whether a text begins with a space; a file that does not say means that it does."""
    prefix = said is not False
    spm = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, model_type="bpe", vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix, minloglevel=2,
    )  # fmt: skip
    oracle = spm.SentencePieceProcessor(model_proto=written.getvalue())
    every = range(len(oracle))
    types = [2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1 for i in every]
    path = write(
        tmp_path / "x.gguf",
        ggml__model="llama",
        ggml__tokens=[oracle.id_to_piece(i) for i in every],
        ggml__scores=[oracle.get_score(i) for i in every],
        ggml__token_type=types,
        **({} if said is None else {"ggml__add_space_prefix": said}),
    )
    ours = Tokenizer.from_folder(path)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.encode("n")[0] == 1

    @settings(max_examples=150)
    @given(TEXT)
    def check(text: str) -> None:
        ids = oracle.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == oracle.decode(ids)

    check()


def test_chat_templates(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.gguf",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        chat_templates=["tool_use"],
        **{"chat_template.tool_use": "{{ tools | length }}"},
    )
    template = ChatTemplate.from_folder(path, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "<s>hi"
    assert template.render(messages, tools=[{}, {}]) == "2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml__pre": "no-such"}, "'no-such'"),
        ({"ggml__model": "rwkv"}, "'rwkv'"),
        ({"ggml__merges": ["Ġ zzz"]}, "cannot be read"),
        ({"ggml__token_type": [1, 2]}, "cannot be read"),
        ({"ggml__token_type": [77] * 600}, "cannot be read"),
    ],
)
def test_tokenizers_that_cannot_be_are_one_sentence(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", **(byte_level_values(trained("gpt-2"), "gpt-2") | changes))
    with pytest.raises(ModelLoadError, match=words) as caught:
        Tokenizer.from_folder(path)
    assert "\n" not in str(caught.value)


def test_a_file_generates_what_its_model_generates(tmp_path: Path) -> None:
    """From the path alone to tokens and text, equal to transformers' greedy tokens."""
    backend = trained("gpt-2")
    values = byte_level_values(backend, "gpt-2") | {"chat_template": "{{ messages[0].content }}"}
    extra = {f"tokenizer.{name.replace('__', '.')}": value for name, value in values.items()}
    model = tiny_models.build("qwen3", vocab_size=backend.get_vocab_size())
    path = gguf_files.write(model, tmp_path / "model.gguf", extra=extra)
    with LLM(path, device="cpu", seed=0) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        ours = llm.generate("fibonacci", params, use_tqdm=False)[0].outputs[0]
        chatted = llm.chat([{"role": "user", "content": "fibonacci"}], params, use_tqdm=False)[0].outputs[0]
        prompt = llm.get_tokenizer().encode("fibonacci")
    import torch

    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours.token_ids == theirs[0, len(prompt) :].tolist()
    assert ours.text == backend.decode(ours.token_ids)
    assert len(chatted.token_ids) == 8
