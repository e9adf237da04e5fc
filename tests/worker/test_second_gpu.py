"""An engine runs on the GPU it was given, whichever one is current in the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import assemble
from ridgeline.core.settings.config import LLMConfig

PROMPTS = ["def read_json(path):", "class LRUCache:", "import os\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# A prompt that is found in the cache is computed in other shapes, and a bfloat16 model may then choose otherwise
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 1 << 26,
    "max_model_len": 256,
    "enable_prefix_caching": False,
}


def tokens(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_on_the_second_gpu_leaves_the_first_alone(eager: bool) -> None:
    with LLM(device="cuda:0", enforce_eager=eager, **SMALL) as llm:
        expected = tokens(llm)
    del llm
    torch.cuda.empty_cache()
    torch.cuda.set_device(0)
    held, reserved = torch.cuda.mem_get_info(0)[0], torch.cuda.memory_reserved(0)
    with LLM(device="cuda:1", enforce_eager=eager, **SMALL) as llm:
        assert torch.cuda.current_device() == 0
        assert str(llm.assembly.device) == "cuda:1"
        found = [tokens(llm)]
        other = threading.Thread(target=lambda: found.append(tokens(llm)))  # its current device is the first, too
        other.start()
        other.join()
        assert found == [expected, expected]
        assert {p.device for p in llm.assembly.worker.runner.decoder.parameters()} == {torch.device("cuda:1")}
        assert torch.cuda.memory_reserved(0) == reserved
        assert held - torch.cuda.mem_get_info(0)[0] < 16 << 20  # no weights, no cache, no page-locked staging's context


@pytest.mark.parametrize(("asked", "current", "wanted"), [("cuda:1", 0, 1), ("cuda", 1, 1), ("auto", 0, 0)])
def test_all_of_assembling_has_its_device_current(
    monkeypatch: pytest.MonkeyPatch, asked: str, current: int, wanted: int
) -> None:
    """And a device without a number becomes the one that is current now: another thread's may be another."""
    now: list[torch.device] = []
    seen: list[tuple[torch.device, list[torch.device]]] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        now.append(device)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    module = "ridgeline.assembly.wiring"
    monkeypatch.setattr(f"{module}.on_device", entered)
    monkeypatch.setattr(f"{module}._assemble", lambda config, device, *_: seen.append((device, [*now])))
    assemble(LLMConfig(device=asked))
    assert seen == [(torch.device("cuda", wanted), [torch.device("cuda", wanted)])]
    assert not now
