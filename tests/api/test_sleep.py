"""An LLM that sleeps and wakes: the same tokens as without, whatever was under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.worker.local import LocalWorker

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def add(a, b):", "class Stack:"]


@pytest.fixture
def llm(embedded: Path) -> Iterator[LLM]:
    with LLM(embedded, device="cpu", max_model_len=128, kv_cache_memory=1 << 22, max_num_seqs=4) as made:
        yield made


@pytest.fixture
def embedded() -> Path:
    from ridgeline.weights.folder import EMBEDDED_MODEL

    return EMBEDDED_MODEL


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("level", [1, 2])
def test_outputs_after_a_sleep_are_those_before(llm: LLM, level: int) -> None:
    before = texts(llm)
    llm.sleep(level)
    assert llm.is_sleeping
    with pytest.raises(InvalidRequest, match="asleep"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.wake_up()
    assert not llm.is_sleeping
    assert texts(llm) == before


def test_the_cache_is_gone_and_nobody_finds_anything_in_it(llm: LLM) -> None:
    before = texts(llm)
    worker = llm.assembly.worker
    assert isinstance(worker, LocalWorker)
    held = worker.runner.segments.states.memory.bytes
    assert held.any()
    llm.sleep()
    page = 4096
    inner = held[page:-page]  # the ends may share pages with other memory
    assert not inner.any()
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    llm.wake_up(["kv_cache"])
    found = llm.engine.scheduler.cache.hit_tokens
    assert texts(llm) == before
    assert llm.engine.scheduler.cache.hit_tokens == found


def test_who_sleeps_again_gives_back_what_a_part_woke_up(llm: LLM) -> None:
    before = texts(llm)
    llm.sleep()
    llm.wake_up(["weights"])
    llm.sleep()
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping, "the weights are not there"
    with pytest.raises(InvalidConfig, match="level 1"):
        llm.sleep(2)
    llm.wake_up()
    assert texts(llm) == before


def test_what_is_under_way_goes_on_after_a_sleep(llm: LLM) -> None:
    [whole] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    stream = llm.stream(PROMPTS[0], GREEDY)
    begun = [next(stream), next(stream)]
    with pytest.raises(InvalidConfig, match="under way"):
        llm.sleep(2)
    llm.sleep()
    llm.wake_up()
    pieces = [*begun, *stream]
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text


def test_mistakes_are_told(llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match="level must be 1"):
        llm.sleep(3)
    with pytest.raises(InvalidConfig, match="no tag 'wights'"):
        llm.wake_up(["wights"])  # type: ignore[list-item]
    llm.wake_up()  # nothing to do
    llm.sleep()
    llm.sleep()
    llm.wake_up()
    assert len(texts(llm)) == 2


@pytest.mark.gpu
def test_a_gpus_memory_comes_back_at_the_same_place(embedded: Path) -> None:
    import torch

    free = lambda: torch.cuda.mem_get_info()[0]  # noqa: E731
    with LLM(embedded, device="cuda", enable_sleep_mode=True, kv_cache_memory=1 << 30) as llm:
        before, awake = texts(llm), free()
        for _ in range(2):
            llm.sleep()
            assert free() - awake > 1 << 30
            llm.wake_up()
            assert abs(free() - awake) < 64 << 20
            assert texts(llm) == before


@pytest.mark.gpu
def test_a_gpu_sleeps_only_if_that_was_prepared(embedded: Path) -> None:
    with LLM(embedded, device="cuda", kv_cache_memory=1 << 28) as llm:
        with pytest.raises(InvalidConfig, match="enable_sleep_mode"):
            llm.sleep()
        assert len(texts(llm)) == 2
