"""Scores that are not numbers end their own request with a sentence, and no other request is affected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.driving import ask, rig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DAMAGED = 7  # a token whose embedding is NaN
SAMPLED = {"greedy": {}, "random": {"temperature": 1.0}, "filtered": {"temperature": 1.0, "top_p": 0.5}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.save("llama", tmp_path_factory.mktemp("damaged"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][DAMAGED] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED.keys())
def test_who_gets_no_numbers_ends_with_an_error(
    folder: Path, tiny_model: Callable[[str], Path], params: dict[str, float], device: str
) -> None:
    asked = [ask("a", (5, 6, 9)), ask("b", (5, DAMAGED, 9), stop_ids=frozenset({11}), **params), ask("c", (8,) * 20)]
    options = {"device": device, "kv_cache_memory": 1 << 24}
    with rig(tiny_model("llama"), **options) as own:
        expected = own.run(*asked)
    with rig(folder, **options) as own:
        outcomes = own.run(*asked)
        assert not own.errors
        again = own.run(ask("d", asked[0].prompt_token_ids))["d"]
    assert outcomes["b"].tokens == []
    assert outcomes["b"].finish_reason == "error"
    assert "not numbers (NaN)" in str(outcomes["b"].error)
    for name in ("a", "c"):
        assert DAMAGED not in outcomes[name].tokens
        assert outcomes[name].tokens == expected[name].tokens
        assert again.tokens == outcomes["a"].tokens
