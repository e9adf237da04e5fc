"""A model folder or configuration that cannot work gives one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig, ModelLoadError


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_folder() -> None:
    with pytest.raises(ModelLoadError, match="/no/such/folder"):
        LLM("/no/such/folder")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(copy_of: Callable[[], Path], missing: str) -> None:
    folder = copy_of()
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=missing):
        LLM(folder, device="cpu")


def test_unknown_architecture_says_where_the_known_are_listed(copy_of: Callable[[], Path]) -> None:
    folder = copy_of()
    edit_config(folder, architectures=["FancyForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"FancyForCausalLM.*`ridgeline models` lists"):
        LLM(folder, device="cpu")


def test_truncated_weights(copy_of: Callable[[], Path]) -> None:
    folder = copy_of()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        LLM(folder, device="cpu")


def test_config_and_weights_that_disagree(copy_of: Callable[[], Path]) -> None:
    folder = copy_of()
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float8"}, "float8"),
        ({"device": "tpu"}, "tpu"),
        ({"load_format": "pickle"}, "pickle"),
        ({"max_model_len": 10**6}, "256"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"block_size": 12}, "12"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"kv_cache_memory": 1000, "max_model_len": 200}, "kv_cache_memory"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"scheduling_policy": "lottery"}, "fcfs, priority"),
        ({"scheduling_policy": []}, "fcfs, priority"),
        ({"max_model_len": 3.5}, "max_model_len must be a whole number, got 3.5"),
        ({"block_size": "16"}, "block_size must be a whole number, got '16'"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"kv_cache_memory": 1.5e6}, "kv_cache_memory"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_wrong_options(text_model: Path, options: dict, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence) as caught:
        LLM(text_model, **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none(text_model: Path) -> None:
    with pytest.raises(InvalidConfig, match="sees no GPU"):
        LLM(text_model, device="cuda")


def test_the_context_shrinks_to_what_the_cache_holds_unless_it_was_asked_for(text_model: Path) -> None:
    with LLM(text_model, device="cpu", kv_cache_memory=60_000) as llm:
        fitting = llm.engine.config.max_model_len
    assert 16 <= fitting < 256
    with pytest.raises(InvalidConfig, match="lower max_model_len"):
        LLM(text_model, device="cpu", kv_cache_memory=60_000, max_model_len=256)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": [{}]},
        {"vocab_size": 10**10},
        {"vocab_size": 10**30},
        {"hidden_size": 2**24},
        {"head_dim": 10**19},
        {"head_dim": 2**24},
        {"intermediate_size": 2**24},
        {"num_attention_heads": 2**24},
        {"num_attention_heads": 512, "num_key_value_heads": 1, "head_dim": None},
        {"max_position_embeddings": 10**10},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
        {"partial_rotary_factor": 1e300},
        {"partial_rotary_factor": 1e-9},
    ],
)
def test_numbers_of_no_real_model(copy_of: Callable[[], Path], changes: dict) -> None:
    folder = copy_of()
    edit_config(folder, **changes)
    with pytest.raises((ModelLoadError, InvalidConfig)) as caught:
        LLM(folder)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_nested_without_end(copy_of: Callable[[], Path], name: str) -> None:
    folder = copy_of()
    (folder / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelLoadError, match=name):
        LLM(folder)


@pytest.mark.parametrize(
    "shard", ["../../../etc/passwd", "/etc/passwd", "", ".", "a\nb.safetensors", "\ud800", "a" * 5000]
)
def test_an_index_names_only_files_beside_it(copy_of: Callable[[], Path], shard: str) -> None:
    folder = copy_of()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelLoadError, match="file of that folder") as caught:
        LLM(folder)
    assert len(str(caught.value)) < 500


def test_an_end_of_sequence_id_outside_the_vocabulary_never_comes(copy_of: Callable[[], Path]) -> None:
    folder = copy_of()
    edit_config(folder, eos_token_id=[2, 10**30])
    with LLM(folder) as llm:
        assert llm.generate("hens", use_tqdm=False)[0].outputs[0].error is None


@pytest.mark.parametrize("model", [5, b"x", "a" * 5000, "~nosuchuser/x"])
def test_what_is_no_path(model: Any) -> None:
    with pytest.raises(ModelLoadError, match="is no path"):
        LLM(model)


@pytest.mark.parametrize("options", [{"device": 5}, {"device": None}, {"kv_cache_memory": 10**15}])
def test_options_that_no_machine_has(text_model: Path, options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        LLM(text_model, **options)
