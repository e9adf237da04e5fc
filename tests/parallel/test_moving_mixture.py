"""The shipped mixture on two ranks between which experts move: one device's tokens, an even load, and then rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("forked_ranks")

pytest.importorskip("msgspec")

MIXTURE = Path(EMBEDDED_MODEL).with_name("embedded-moe")
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()  # a text that stays, since loads follow it
PROMPTS = [TEXT[at : at + 400] for at in range(0, 6400, 400)]
EPLB = {"window_size": 30, "step_interval": 30, "num_redundant_experts": 2}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def written(llm: LLM) -> list[Any]:
    results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.dealt
@pytest.mark.parametrize(
    "size",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp"),
        pytest.param({"data_parallel_size": 2}, id="dp", marks=pytest.mark.thorough),  # tests/ranks/test_rebalancing.py
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO])])  # captured there
def test_the_load_becomes_even_while_tokens_stay(device: str, size: dict[str, int]) -> None:
    options: dict[str, Any] = {
        "device": device,
        "dtype": "float32",
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
        "kv_cache_memory": 1 << 28,
        "enable_prefix_caching": False,  # so that each time the same tokens run
    }
    with LLM(MIXTURE, **options) as one:
        want = written(one)
    moving = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": EPLB}
    with LLM(MIXTURE, **options, **size, **moving) as two:
        figures = []
        for _ in range(4):
            assert written(two) == want
            figures.append(two.assembly.worker.figures().rebalanced)
    first, last = figures[0], figures[-1]
    assert first is not None
    assert last is not None
    assert first.moves > 0
    assert last.copied > 0
    assert last.looks > first.looks
    assert last.moves - figures[-2].moves < first.moves  # type: ignore[union-attr]
    assert last.after < 1.06
