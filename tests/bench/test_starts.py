"""What the script of starts makes: a checkpoint that loads, with a tokenizer; and what it reads from a server's log."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from ridgeline.text.tokenizer import Tokenizer
from ridgeline_bench.scripts import starts

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "max_position_embeddings": 64, "eos_token_id": 1,
}  # fmt: skip


def test_a_made_checkpoint_has_every_tensor_in_shards(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    with starts.made(source, place, tokens=300, shard=40_000, block=1 << 12) as folder:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 1
        for name, shape in starts.shapes(source).items():
            with safe_open(folder / index[name], framework="pt") as file:
                tensor = file.get_tensor(name)
            assert list(tensor.shape) == shape
            assert 0.001 < tensor.float().std() < 0.1
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.decode(tokenizer.encode("three words here")) == "three words here"
    assert not folder.exists()


def test_a_tokenizer_has_so_many_tokens() -> None:
    model = starts.tokenizer(700)["model"]
    assert len(model["vocab"]) == 700
    assert len(model["merges"]) == 700 - 256


def test_stages_are_read_from_a_log() -> None:
    log = "12:00:01 INFO the engine was ready after 7.10 s: command 0.21, python 0.05, imports 3.64\nINFO other\n"
    assert starts.staged(log) == {"command": 0.21, "python": 0.05, "imports": 3.64}
    assert starts.staged("nothing") == {}
