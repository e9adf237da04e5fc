"""The real worker's side of the contract: it refuses what it does not hold, drops until reset, and keeps its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from tests.driving import Rig, alone, ask, rig

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)

FIELDS: dict[str, Callable[[Rig], None]] = {
    "kv_len": lambda r: r.runner.slots.kv_len_S.sub_(1),
    "max_len": lambda r: r.runner.slots.max_len_S.add_(1),
    "blocks of group 0": lambda r: r.runner.slots.block_tables_ASC[0, :, 1].fill_(9),
    "seed": lambda r: r.runner.slots.sampling.seed_S.add_(1),
    "temperature": lambda r: r.runner.slots.sampling.temperature_S.fill_(0.3),
    "top_k": lambda r: r.runner.slots.sampling.top_k_S.fill_(3),
    "min_len": lambda r: r.runner.slots.sampling.min_len_S.fill_(30),
    "stop ids": lambda r: r.runner.slots.sampling.stop_ids_SE.fill_(9),
    "biased ids": lambda r: r.runner.slots.sampling.bias_ids_SB.fill_(9),
    "generation": lambda r: r.runner.slots.generations.fill(7),
}


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.mark.parametrize("field", FIELDS)
def test_debug_checks_find_a_damaged_table_and_the_engine_recovers(folder: Path, field: str) -> None:
    request = ask("a", PROMPT, max_tokens=12)
    expected = alone(folder, request)
    with rig(folder) as own:
        own.add(request)
        for _ in range(4):
            own.step()
        while own.engine.scheduler.in_flight:  # let the worker's thread come to rest
            own.engine.scheduler.update(own.worker.collect())
        own.outcomes["a"].tokens = expected[: len(own.engine.scheduler._by_id["a"].output)]
        FIELDS[field](own)
        own.run()
        assert len(own.errors) == 1
        assert f"ContractViolation: slot 0: {field} is" in own.errors[0]
        assert own.outcomes["a"].tokens == expected


def test_a_plan_that_names_another_generation_fails_and_later_plans_are_dropped_until_reset(folder: Path) -> None:
    with rig(folder, debug_checks=False) as own:
        scheduler, worker = own.engine.scheduler, own.worker
        scheduler.add(ask("a", PROMPT))
        good = scheduler.schedule()
        assert good is not None
        wrong = replace(good, rows=replace(good.rows, generations_R=good.rows.generations_R + 1))
        later = replace(good, id=2, reset=False, deltas=())
        again = replace(good, id=3)
        for plan in (wrong, later, again):
            worker.submit(plan)
        failed, dropped, done = (worker.collect() for _ in range(3))
        assert "generation 2; the worker holds generation 1" in (failed.error or "")
        assert not failed.dropped
        assert (dropped.dropped, dropped.error) == (True, None)
        assert (done.dropped, done.error) == (False, None)
        assert done.tokens_RK.tolist() == [alone(folder, ask("a", PROMPT))[:1]]


def test_a_released_slot_holds_no_generation(folder: Path) -> None:
    with rig(folder) as own:
        own.run(ask("a", PROMPT))
        own.run(ask("b", PROMPT))  # its first plan brings the the release
        assert own.runner.slots.generations[1] == 0
        own.run(ask("c", PROMPT), ask("d", PROMPT))
        own.runner.slots.reset()
        assert not any(own.runner.slots.generations)


@pytest.mark.parametrize("segment", ["forward", "sample"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_fault_in_either_segment_changes_nobodys_tokens(folder: Path, segment: str, at: int) -> None:
    requests = [ask("a", PROMPT), ask("b", PROMPT[::-1], temperature=1, seed=3), ask("c", PROMPT[:3])]
    expected = {request.id: alone(folder, request) for request in requests}
    with rig(folder) as own:
        _fail_once(own, segment, at)
        outcomes = own.run(*requests)
        assert len(own.errors) == 1
        assert {name: outcome.tokens for name, outcome in outcomes.items()} == expected


def _fail_once(own: Rig, segment: str, at: int) -> None:
    run, calls = getattr(own.runner, segment), []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == at:
            raise RuntimeError("the device fell over")
        return run(*arguments)

    setattr(own.runner, segment, failing)


def test_a_request_that_breaks_every_step_ends_alone(folder: Path) -> None:
    poison = 99
    requests = [ask("a", PROMPT), ask("b", (*PROMPT, poison)), ask("c", PROMPT[:5])]
    expected = {request.id: alone(folder, request) for request in requests}
    with rig(folder) as own:
        forward = own.runner.forward

        def failing(plan):
            if any(poison in span.token_ids for span in plan.spans):
                raise RuntimeError("an odd token")
            return forward(plan)

        own.runner.forward = failing  # type: ignore[method-assign]
        outcomes = own.run(*requests)
        assert (outcomes["b"].finish_reason, outcomes["b"].error) == ("error", "RuntimeError: an odd token")
        assert [outcomes[name].tokens for name in "ac"] == [expected["a"], expected["c"]]
        assert own.engine.scheduler.cache.pool.free_pages == own.engine.scheduler.cache.pool.num_pages


@pytest.mark.parametrize("most", [1, 3, 7])
def test_steps_shrink_until_they_fit_and_everybody_gets_their_tokens(
    folder: Path, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A device with memory for `most` tokens a step: first a chunk of prompts is too large, then decodes beside it."""
    requests = [ask("a", PROMPT * 2), ask("b", PROMPT[::-1], temperature=1, seed=3), ask("c", PROMPT[:3])]
    expected = {request.id: alone(folder, request) for request in requests}
    with rig(folder) as own:
        forward = own.runner.forward

        def cramped(plan):
            if plan.num_tokens > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(plan)

        own.runner.forward = cramped  # type: ignore[method-assign]
        outcomes = own.run(*requests)
        assert own.errors
        assert {name: outcome.tokens for name, outcome in outcomes.items()} == expected
        assert own.engine.scheduler.cache.pool.free_pages == own.engine.scheduler.cache.pool.num_pages
    assert "ran out of memory in a step of 32 tokens; its requests start over in steps of at most 16" in caplog.text


def test_a_request_that_does_not_fit_alone_ends_alone(folder: Path) -> None:
    with rig(folder) as own:

        def full(plan):
            raise torch.OutOfMemoryError("CUDA out of memory")

        own.runner.forward = full  # type: ignore[method-assign]
        outcomes = own.run(ask("a", PROMPT), ask("b", PROMPT))
        assert {outcome.finish_reason for outcome in outcomes.values()} == {"error"}
        assert "out of memory" in (outcomes["a"].error or "")


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_a_stopped_row_writes_to_the_null_block_only(tiny_model: Callable[[str], Path], family: str) -> None:
    """The end comes in plan N; plan N+1, already under way, must leave every block as it was."""
    folder = tiny_model(family)
    stop = alone(folder, ask("a", PROMPT))[0]
    with rig(folder) as own:
        scheduler, layout = own.engine.scheduler, own.engine.layout
        scheduler.add(ask("a", PROMPT, stop_ids=frozenset([stop])))
        slabs = own.runner.segments.states.memory.bytes.view(-1, layout.slab_bytes)
        for expected_token in (stop, -1):
            plan = scheduler.schedule()
            assert plan is not None
            own.worker.submit(plan)
            result = own.worker.collect()
            assert result.tokens_RK.tolist() == [[expected_token]]
            if expected_token == stop:
                before = slabs.clone()
        changed = (slabs != before).any(1).nonzero()[:, 0].tolist()
        assert {slab % layout.num_pages for slab in changed} == {0}


@pytest.mark.parametrize(("prompt", "total"), [((), 4), ((1, 2), 2), ((1, 2), 10_000), ((1, 9999), 5)])
def test_a_request_that_could_never_run_is_refused(folder: Path, prompt: tuple[int, ...], total: int) -> None:
    with rig(folder) as own, pytest.raises(InvalidRequest):
        own.engine.add(replace(ask("a", prompt), max_total_tokens=total))


def test_a_prompt_is_scored_in_pieces_as_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores() -> list[np.ndarray]:
        with rig(folder) as own:
            own.run(ask("a", PROMPT, prompt_logprobs=2))
            [found] = [result.prompt_logprobs[0] for result in own.results if result.prompt_logprobs]
            return [found.logprob_R, found.rank_R, found.top_ids_RL, found.top_logprobs_RL]

    at_once = scores()
    monkeypatch.setattr("ridgeline.worker.logprobs.SCORED_AT_ONCE", 4)
    assert len(at_once[0]) == len(PROMPT) - 1
    for whole, joined in zip(at_once, scores(), strict=True):
        np.testing.assert_allclose(joined, whole, rtol=1e-5)


def test_a_device_too_small_for_cache_and_graphs_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cramped(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("ridgeline.assembly.device.Runner", cramped)
    with pytest.raises(InvalidConfig, match="ran out of memory while the cache and the graphs were made"), rig(folder):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_second_gpu_gives_the_firsts_tokens(folder: Path, enforce_eager: bool) -> None:
    """While the thread's current device stays the first."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    request, tokens = ask("a", PROMPT, max_tokens=20), []
    for device in ("cuda:0", "cuda:1"):
        options = {"device": device, "enforce_eager": enforce_eager, "kv_cache_memory": 1 << 24}
        with rig(folder, **options, debug_checks=False) as own:
            tokens.append(own.run(request)["a"].tokens)
            assert not own.errors
    assert tokens[0] == tokens[1]
    assert torch.cuda.current_device() == 0


def test_a_worker_whose_device_is_lost_ends_without_another_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    with rig(folder) as own:
        own.run(ask("a", PROMPT, max_tokens=2))
        monkeypatch.setattr(own.worker, "_runner", SimpleNamespace(device=torch.device("cuda")))
        monkeypatch.setattr(own.worker, "_expert_cache", lambda: None)
        own.worker.shutdown()
        monkeypatch.setattr(own.worker, "shutdown", lambda: None)
