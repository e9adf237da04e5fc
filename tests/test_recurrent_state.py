"""States that every token replaces, beside attention with and without windows: every way that a request can go."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline import LLM, BeamSearchParams, SamplingParams
from ridgeline.core.plan.request import Preemption, Request
from tests.driving import Rig, ask
from tests.toy_models import fill, greedy, toy_model, toy_rig

LAYERS = ("ss", "sf", "fsws")
TOKENS = 300


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def some(number: int, longest: int, seed: int = 0, shared: tuple[int, ...] = ()) -> list[Request]:
    draw = random.Random(seed)
    return [
        ask(
            f"{seed}.{n}",
            (*shared, *(draw.randrange(3, TOKENS) for _ in range(draw.randint(1, longest)))),
            max_tokens=draw.randint(1, 9),
        )
        for n in range(number)
    ]


def check(own: Rig, requests: list[Request]) -> None:
    """Every request has the tokens that the decoder alone gives it, and nothing is left behind."""
    assert own.errors == []
    for request in requests:
        assert own.outcomes[request.id].tokens == greedy(own.runner.decoder, request)
    pool = own.engine.scheduler.cache.pool
    assert pool.free_pages == pool.num_pages


@pytest.mark.parametrize("layers", LAYERS)
def test_any_mix_of_chunks_and_rows_gives_the_tokens_of_the_decoder_alone(llama: Path, layers: str) -> None:
    with toy_rig(llama, layers, max_num_batched_tokens=13, max_num_seqs=5) as own:
        requests = some(12, longest=40)
        own.run(*requests)
        check(own, requests)
        assert own.engine.scheduler.cache.hit_tokens == 0
        assert len({token for outcome in own.outcomes.values() for token in outcome.tokens}) > 20


@pytest.mark.parametrize("layers", LAYERS)
def test_whoever_gives_way_goes_on_where_it_was(llama: Path, layers: str) -> None:
    with toy_rig(llama, layers, max_num_batched_tokens=16, max_num_seqs=6, max_model_len=64) as own:
        scheduler = own.engine.scheduler
        draw, requests = random.Random(3), some(8, longest=40, seed=2)
        own.add(*requests)
        for step in range(400):
            if not own.engine.has_work:
                break
            running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
            if step % 3 == 2 and running:
                scheduler._preempt(draw.choice(running), Preemption.BLOCKS)
            own.step()
        assert scheduler.preemptions.total() > 5
        assert scheduler.cache.checkpoints.counts.used > 3
        check(own, requests)


@pytest.mark.parametrize("layers", LAYERS)
def test_what_begins_alike_goes_on_from_a_kept_state(llama: Path, layers: str) -> None:
    """Whole blocks, the end of a conversation in the middle of a block, and what another request has just written."""
    with toy_rig(llama, layers, max_num_batched_tokens=16, max_num_seqs=4, kv_cache_memory=1 << 20) as own:
        cache, shared = own.engine.scheduler.cache, tuple(range(20, 41))
        first = some(3, longest=9, seed=5, shared=shared)
        own.run(*first)
        again = some(3, longest=9, seed=6, shared=shared)
        own.run(*again)
        assert cache.hit_tokens >= 2 * 16
        hits = cache.hit_tokens
        turns = [
            ask(f"turn {n}", (*r.prompt_token_ids, *own.outcomes[r.id].tokens[:-1], 7, 8, 9), max_tokens=4)
            for n, r in enumerate(again)
        ]
        for turn, earlier in zip(turns, again, strict=True):
            own.run(turn)
            known = len(earlier.prompt_token_ids) + len(own.outcomes[earlier.id].tokens) - 1
            assert cache.hit_tokens - hits >= known // 4 * 4
            hits = cache.hit_tokens
        check(own, [*first, *again, *turns])


def test_the_end_of_a_conversation_is_copied_and_only_as_a_whole(llama: Path) -> None:
    with toy_rig(llama, "sf", max_num_seqs=2) as own:
        cache = own.engine.scheduler.cache
        first = ask("first", range(50, 59), max_tokens=3)
        own.run(first)
        written = (*first.prompt_token_ids, *own.outcomes["first"].tokens[:-1])
        assert len(written) == 11  # two blocks of four, and three tokens in another
        whole, part = ask("whole", (*written, 9, 9), max_tokens=3), ask("part", (*written[:10], 9, 9), max_tokens=3)
        own.run(whole)
        assert cache.hit_tokens == 11
        own.run(part)
        assert cache.hit_tokens == 11 + 8
        check(own, [first, whole, part])


def test_what_a_request_wrote_beyond_its_end_is_not_found(llama: Path) -> None:
    """The caller keeps fewer tokens than were drawn, so the state is too far."""
    with toy_rig(llama, "sf", max_num_seqs=2) as own:
        long = ask("long", range(50, 59), max_tokens=30)
        own.add(long)
        while len(own.outcomes["long"].tokens) < 6:
            own.step()
        own.engine.abort("long", 3)
        kept = own.outcomes["long"].tokens[:3]
        after = ask("after", (*range(50, 59), *kept, 11, 12), max_tokens=4)
        own.run(after)
        check(own, [after])


def test_aborts_at_any_time_leave_right_states_behind(llama: Path) -> None:
    draw, shared = random.Random(11), tuple(range(60, 90))
    with toy_rig(llama, "fsws", max_num_batched_tokens=24, max_num_seqs=5) as own:
        requests = some(40, longest=20, seed=12, shared=shared[:17]) + some(20, longest=12, seed=13, shared=shared)
        draw.shuffle(requests)
        left, running, ended = list(requests), set[str](), set[str]()
        while left or own.engine.has_work:
            if left and draw.random() < 0.6:
                own.add(left[0])
                running.add(left.pop(0).id)
            if running and draw.random() < 0.25:
                name = draw.choice(sorted(running))
                if own.engine.abort(name, draw.choice((None, 0, 2))):
                    ended.add(name)
                running.discard(name)
            own.step()
            running -= {name for name in running if own.outcomes[name].finish_reason}
        assert len(ended) > 5
        assert own.engine.scheduler.cache.hit_tokens > 200
        check(own, [request for request in requests if request.id not in ended])


@pytest.mark.parametrize("layers", LAYERS)
def test_the_third_request_with_a_beginning_goes_on_behind_it(llama: Path, layers: str) -> None:
    """In whatever chunks the second one left the state there."""
    for budget in (4, 9, 16, 64):
        with toy_rig(llama, layers, max_num_batched_tokens=budget, kv_cache_memory=1 << 20) as own:
            cache, shared = own.engine.scheduler.cache, tuple(range(20, 42))
            requests = [ask(f"r{n}", (*shared, 100 + n, *range(7 * n, 7 * n + 9)), max_tokens=5) for n in range(4)]
            hits = []
            for request in requests:
                own.run(request)
                hits.append(cache.hit_tokens - sum(hits))
            assert hits[2:] == [20, 20]
            check(own, requests)


@pytest.mark.parametrize("layers", LAYERS)
def test_every_turn_of_a_chat_runs_its_new_tokens_alone(llama: Path, layers: str) -> None:
    with toy_rig(llama, layers, max_num_batched_tokens=32, kv_cache_memory=1 << 20, max_model_len=160) as own:
        cache, known, written = own.engine.scheduler.cache, list(range(30, 41)), 0
        for turn in range(10):
            request, before = ask(f"turn {turn}", known, max_tokens=5), cache.hit_tokens
            own.run(request)
            assert cache.hit_tokens - before == written
            known += own.outcomes[request.id].tokens
            written = len(known) - 1
            known += [50 + turn, 60 + turn, 70 + turn]
            check(own, [request])


def outputs(llama: Path, layers: str, caching: bool) -> tuple[list[list[int]], int]:
    """Tokens of samples, of guided requests and of beams, one after the other; and how many of prompts' were found."""
    prompts = [{"prompt_token_ids": [*range(20, 50), *rest]} for rest in ([], [3, 4], [3, 5, 6, 7, 8], [])]
    settings = {"dtype": "float32", "device": "cpu", "debug_checks": True, "block_size": 4, "load_format": "dummy"}
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "max_model_len": 96}
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    guided = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, guidance_scale=1.7)
    with toy_model(llama, layers):
        llm = LLM(llama, skip_tokenizer_init=True, enable_prefix_caching=caching, **settings, **sizes)
    try:
        fill(llm.engine._worker._runner.decoder)  # type: ignore[attr-defined]
        found = [list(one.token_ids) for params in (several, guided) for each in llm.generate(prompts, params)
                 for one in each.outputs]  # fmt: skip
        beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=7))
        found += [list(beam.token_ids) for each in beams for beam in each.outputs]
        return found, llm.engine.scheduler.cache.hit_tokens
    finally:
        llm.shutdown()


@pytest.mark.parametrize("layers", ["ss", "fsws"])
def test_samples_guidance_and_beams_are_the_same_with_and_without_the_cache(llama: Path, layers: str) -> None:
    (cached, hits), (plain, none) = outputs(llama, layers, True), outputs(llama, layers, False)
    assert cached == plain
    assert hits > 1000
    assert none == 0
    assert len({tuple(tokens) for tokens in plain}) > 15
