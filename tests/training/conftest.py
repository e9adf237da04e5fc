"""A model, a tokenizer and a text small enough to train in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.training.data import write_tokens
from ridgeline.training.embedded import llama_config
from ridgeline.training.export import write_model
from ridgeline.training.objective import training_decoder
from ridgeline.training.optimizer import initialize
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents, train_tokenizer

VOCAB = 384
TEXTS = [
    f"def add_{i}(a, b):\n    # é: two bytes\n    total = a + b * {i}\n\n    return total\n\n\nprint(add_{i}({i}, 2))\n"
    for i in range(40)
]


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    tiny = llama_config(hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1)
    return tiny | {"vocab_size": VOCAB, "head_dim": 32, "max_position_embeddings": 64}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, VOCAB, sample_bytes=1_000_000, seed=0)


@pytest.fixture
def decoder(config: dict[str, Any]) -> Decoder:
    decoder = training_decoder(model_config(config).spec, torch.float32, torch.device("cpu"))
    initialize(decoder, config["num_hidden_layers"], seed=0)
    return decoder


@pytest.fixture
def token_file(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    write_tokens(tmp_path / "tokens.bin", encode_documents(tokenizer, TEXTS), SEPARATOR_ID)
    return tmp_path / "tokens.bin"


@pytest.fixture
def folder(decoder: Decoder, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A target that is sure of what it writes, and does not write one token for ever."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1:
                spread = 0.4 if "embed" in name else 0.15
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    write_model(tmp_path / "target", decoder, config, tokenizer)
    return tmp_path / "target"
