"""No bit of a request depends on what runs beside it, nor on how its prompt is cut, with two ranks whose kernels
promise so for one device. The kernels run in Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")
pytest.importorskip("triton")

from ridgeline.core.plan.request import Request
from ridgeline.kernels.ops import DETERMINISTIC
from ridgeline.ranks import recruits
from tests.driving import rig
from tests.test_triton_engine import TRITON
from tests.worker.test_company import arriving, mixed_requests, one_by_one, report, save_model

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "head_dim": 32,
}


@pytest.mark.thorough  # slow to interpret
@pytest.mark.parametrize(("number", "most"), [(5, 3), (13, 6)], ids=["filters and prompts", "every kind"])
@pytest.mark.usefixtures("crowded")
def test_no_bit_depends_on_what_runs_beside_a_request_on_two_ranks(
    number: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests() -> list[Request]:
        return mixed_requests(number, longest=20, most=most, vocab=320)

    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.interpreted_rank")
    folder = save_model(tmp_path, **SMALL)
    options = {
        "tensor_parallel_size": 2,
        "kernels": {**TRITON, **DETERMINISTIC},
        "debug_checks": False,
        "kv_cache_memory": 1 << 22,
    }
    whole = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with rig(folder, **options, **whole) as own:
        alone = one_by_one(own, requests())
    assert all(len(scored) == len(tokens) for tokens, scored, _ in alone.values())
    assert any(prompt for _, _, prompt in alone.values())
    order = requests()
    random.Random(1).shuffle(order)
    with rig(folder, **options, max_num_seqs=9, max_num_batched_tokens=11) as own:
        together = arriving(own, order, 4, preempting=True)
        assert own.engine.scheduler.preemptions.total() > 0
        assert max(len(result.tokens_RK) for result in own.results) >= min(number - 1, 6)
    assert report(order, alone, together) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_bit_depends_on_what_runs_beside_a_request_on_two_gpus(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "deterministic": True,
        "debug_checks": False,
        "max_model_len": 1024,
        "kv_cache_memory": 1 << 28,
    }
    folder = save_model(tmp_path)
    with rig(folder, **options, max_num_seqs=2, max_num_batched_tokens=2048, enable_prefix_caching=False) as own:
        alone = one_by_one(own, mixed_requests(64))
    with rig(folder, **options, max_num_seqs=64, max_num_batched_tokens=777) as own:
        together = arriving(own, mixed_requests(64), 9, preempting=True)
        assert own.engine.scheduler.preemptions.total() > 0
    assert report(mixed_requests(64), alone, together) == []
