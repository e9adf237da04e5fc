"""The whole engine on Triton kernels: in the interpreter here, as captured graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.op import load_op
from ridgeline.kernels.ops import OPS
from tests.driving import ask, rig

PROMPTS = {"a": tuple(range(5, 24)), "b": (7, 8, 9), "c": tuple(range(40, 90)), "d": (3,)}
TRITON = {
    name: "triton" for name, target in OPS.items() if any(i.name == "triton" for i in load_op(target).implementations)
}


def requests() -> list:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    return [ask(name, ids, max_tokens=6, **(sampled if name == "d" else {})) for name, ids in PROMPTS.items()]


def plain(folder: Path) -> dict[str, list[int]]:
    with rig(folder) as own:
        return {name: outcome.tokens for name, outcome in own.run(*requests()).items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_tokens_equal_those_of_the_plain_ops(tiny_model: Callable[[str], Path], family: str) -> None:
    assert "paged_attention" in TRITON
    folder = tiny_model(family)
    with rig(folder, kernels=TRITON) as own:
        outcomes = own.run(*requests())
        assert not own.errors
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == plain(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixed", "gpt2"])
def test_on_a_gpu_graphs_change_nothing(tiny_model: Callable[[str], Path], family: str, enforce_eager: bool) -> None:
    folder = tiny_model(family)
    with rig(folder, device="cuda", enforce_eager=enforce_eager, kv_cache_memory=1 << 26) as own:
        outcomes = own.run(*requests())
        assert not own.errors
        assert own.runner.device == torch.device("cuda", 0) or own.runner.device.type == "cuda"
    assert {name: outcome.tokens for name, outcome in outcomes.items()} == plain(folder)
