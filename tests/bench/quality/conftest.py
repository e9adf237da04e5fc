"""A tiny random model that reads text, in float32, and the same in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from ridgeline import LLM
from tests import tiny_models
from tests.api.conftest import write_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, then the hen é and other hens; word over word. " * 3


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer names <s> as BOS, and puts it before nothing by itself."""
    made = tiny_models.save("llama", tmp_path_factory.mktemp("evaluated"))
    write_tokenizer(made)
    return made


@pytest.fixture(scope="session")
def theirs(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", block_size=4, max_num_batched_tokens=64) as built:
        yield built
