"""A tiny engine that the tests of experiments share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline_bench.scripts.driven import Driven

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    (found / "config.json").write_text(json.dumps(CONFIG))
    return found


@pytest.fixture(scope="package")
def driven(folder: Path) -> Iterator[Driven]:
    found = Driven(
        str(folder), load_format="dummy", device="cpu", max_model_len=512, max_num_seqs=9, max_num_batched_tokens=64,
        kv_cache_memory=1 << 22,
    )  # fmt: skip
    yield found
    found.close()
