"""A tiny random model that reads and writes text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ridgeline import LLM
from tests import tiny_models

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with tiny_models.VOCAB entries; ids 1 and 2 are <s> and </s>, as the model's config says."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tiny_models.VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, then the hen and the other hens"] * 9, trainer
    )
    while tokenizer.get_vocab_size() < tiny_models.VOCAB:
        tokenizer.add_tokens([f"word{tokenizer.get_vocab_size()}"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny llama with a tokenizer and a chat template. Do not write to it."""
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("text_model"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, device="cpu", block_size=4, max_num_batched_tokens=64, debug_checks=True) as built:
        yield built


@pytest.fixture
def copy_of(text_model: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy of the model folder that a test may damage."""
    import shutil

    def make() -> Path:
        return Path(shutil.copytree(text_model, tmp_path / "model"))

    return make
