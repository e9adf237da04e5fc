"""Wrong arguments, interrupts and abandoned work: the same LLM goes on afterwards, idle and with all its memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.interrupts import uninterrupted

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(text_model: Path) -> Iterator[LLM]:
    """One LLM for each test: the state that a failing test leaves affects no other."""
    with LLM(text_model, device="cpu", block_size=4, max_num_batched_tokens=64, debug_checks=True) as built:
        yield built


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    yield
    pool = llm.engine.scheduler.cache.pool
    assert not llm.engine.has_work
    assert pool.free_pages == pool.num_pages
    assert llm.generate("hens", PARAMS)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "options", "param"),
    [
        (None, {}, "prompt"),
        (3, {}, "prompt"),
        (b"hens", {}, "prompt"),
        ([["hens"]], {}, "prompt"),
        ({"prompt_token_ids": 5}, {}, "prompt"),
        ({"prompt_token_ids": None}, {}, "prompt"),
        ({"prompt_token_ids": "hens"}, {}, "prompt"),
        ({"prompt_token_ids": [True]}, {}, "prompt"),
        ("hens", {"sampling_params": "greedy"}, "sampling_params"),
        ("hens", {"sampling_params": {"temperature": 0}}, "sampling_params"),
        ("hens", {"sampling_params": 5}, "sampling_params"),
        (["hens"], {"sampling_params": [None]}, "sampling_params"),
        (["hens"], {"priority": [1, 2]}, "priority"),
        (["hens"], {"priority": 1}, "priority"),
        (["hens"], {"priority": ["first"]}, "priority"),
        (["hens"], {"cache_salt": 5}, "cache_salt"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(llm: LLM, prompts: Any, options: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("messages", [None, "hens", {"role": "user", "content": "hens"}, iter([1])])
def test_messages_of_the_wrong_type_are_named(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages)
    assert caught.value.param == "messages"


def test_prompts_may_be_any_iterable_and_ids_any_integers(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the quick")
    want = llm.generate({"prompt_token_ids": ids}, PARAMS)[0].outputs[0].token_ids
    for same in (np.array(ids), tuple(ids), (i for i in ids), [np.int64(i) for i in ids]):
        assert llm.generate({"prompt_token_ids": same}, PARAMS)[0].outputs[0].token_ids == want  # type: ignore
    outputs = llm.generate((text for text in ("the quick", "hens")), (PARAMS for _ in range(2)))  # type: ignore[arg-type]
    assert outputs[0].outputs[0].token_ids == want


@pytest.mark.parametrize("seed", [np.int64(5), np.uint64(2**64 - 1)])
def test_a_numpy_seed_is_the_same_as_pythons(llm: LLM, seed: Any) -> None:
    params = PARAMS.replace(temperature=1.0, n=2)
    (numpys,), (pythons,) = (llm.generate("hens", params.replace(seed=s)) for s in (seed, int(seed)))
    assert [c.token_ids for c in numpys.outputs] == [c.token_ids for c in pythons.outputs]
    assert all(c.finish_reason == "length" for c in numpys.outputs)


def test_the_engine_is_idle_after_a_stop_string(llm: LLM) -> None:
    (whole,) = llm.generate("the other", PARAMS)
    llm.generate("the other", PARAMS.replace(stop=whole.outputs[0].text[:1]))
    assert not llm.engine.has_work


@pytest.fixture
def pythons_ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started with it ignored, as background jobs are."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_ctrl_c")
@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.1])
def test_ctrl_c_ends_a_batch_and_nothing_else(llm: LLM, after: float) -> None:
    def run_until_interrupted() -> None:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up:
            llm.generate(["the quick"] * 40, PARAMS.replace(max_tokens=200))

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted()


@pytest.mark.usefixtures("pythons_ctrl_c")
@pytest.mark.parametrize(("times", "survived"), [(1, [1]), (2, [1])])
def test_ctrl_c_is_held_back_once_and_a_second_comes_through(times: int, survived: list[int]) -> None:
    done = []

    def press() -> None:
        with uninterrupted():
            for press in range(1, times + 1):
                signal.raise_signal(signal.SIGINT)
                done.append(press)

    with pytest.raises(KeyboardInterrupt):
        press()
    assert done == survived


def test_after_shutdown_a_request_says_so(text_model: Path) -> None:
    with LLM(text_model) as short_lived:
        pass
    with pytest.raises(InvalidRequest, match="shut down"):
        short_lived.generate("hens")


@pytest.mark.parametrize("wrong", ['{"temperature": -1}', '{"top_p": 0}', '{"top_k": 1.5}', '{"temperature": NaN}'])
def test_recommended_parameters_that_cannot_be_are_found_at_loading(copy_of: Callable[[], Path], wrong: str) -> None:
    folder = copy_of()
    (folder / "generation_config.json").write_text(wrong)
    with pytest.raises(ModelLoadError, match="generation_config"):
        LLM(folder)
