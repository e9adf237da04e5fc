"""The memory of fine-tuning by arithmetic: what is held is what a decoder holds, and the known sizes fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.kernels.base.weight_format import Held
from ridgeline.models import model_config
from ridgeline.perf.fine_tuning import nf4_bytes, tuning_memory
from tests.command import run_here

LLAMA_65B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_8B: dict[str, Any] = LLAMA_65B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 512), (192, 64), (40, 64)])
def test_bytes_of_nf4_are_those_of_its_format(inputs: int, outputs: int) -> None:
    from ridgeline.weights.quantized.rounded import nf4_format  # torch, which the arithmetic does without

    how = nf4_format(inputs)
    wanted = 2 * inputs * outputs
    if how is not None:
        wanted = Held(format=how, scales="int8" if how.nested else "float32").num_bytes(outputs, inputs)
    assert nf4_bytes(inputs, outputs) == wanted


def test_qlora_of_8b_fits_into_16_gb_and_65b_into_48_gb() -> None:
    for config, most, tokens in ((LLAMA_8B, 16e9, 4096), (LLAMA_65B, 48e9, 2048)):
        spec = model_config(config).spec
        parts = tuning_memory(spec, "qlora", tokens=tokens, recompute=True, paged=True)
        assert sum(parts.values()) < most
        assert 0.4 * sum(parts.values()) < parts["weights"]
        plain = tuning_memory(spec, "lora", tokens=tokens, recompute=True)
        assert sum(plain.values()) > most


def test_all_weights_take_sixteen_bytes_a_number() -> None:
    parts = tuning_memory(model_config(LLAMA_8B).spec, "full", tokens=1)
    held = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(16 * 8.03e9, rel=1e-3)


def test_the_command_prints_every_part(tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = run_here("train", "memory", tmp_path, "--pack-tokens", "4096", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)["bytes"]
    assert found["all"] == pytest.approx(sum(value for name, value in found.items() if name != "all"))
    assert "optimizer" in run_here("train", "memory", tmp_path).stdout
