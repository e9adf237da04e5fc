"""A tiny Llama in bfloat16 whose widths groups of 32 and 64 divide, with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny_models
from tests.text.sample_tokenizers import byte_level, write_folder

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 640}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder. Do not write to it."""
    folder = tmp_path_factory.mktemp("compression") / "model"
    tiny_models.build("llama", **SHAPE).to(torch.bfloat16).save_pretrained(folder)
    return write_folder(folder, byte_level())
