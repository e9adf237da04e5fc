"""The engine over groups of ranks under everything at once: arrivals, several completions of a prompt, beams, masks,
guidance, aborts, a cache that is too small. Every request gets the tokens that it gets alone on one device.

All examples use one group of a kind, whose cache keeps what earlier ones left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

pytest.importorskip("msgspec")

from ridgeline import LLM, BeamSearchParams
from ridgeline.core.plan.request import Request, RequestStats
from ridgeline.ranks import leader
from ridgeline.ranks.parts import Dealer
from tests.driving import Rig, ask
from tests.engine.profiles import machine_settings
from tests.ranks.test_group import OneOf

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = tuple(range(10, 43))
PROMPTS = [(5, 6, 7), (9, 9, 9, 9, 9), LONG[:9], LONG[:20], LONG, (*LONG, 7)]
ENDS = frozenset(range(2, 300, 9))  # tokens that end a request, so many that some do
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "typical_p": 0.6},
    {"temperature": 1.0, "top_p": 0.99, "logprobs": 3},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 0.9, "logit_bias": {11: 4.0, 200: 3.5}, "min_tokens": 3},
    {"guidance_scale": 1.6, "temperature": 0.7},
    {"prompt_logprobs": 2},
    {"mask": True, "temperature": 1.0},
]


@dataclass(frozen=True)
class Kind:
    """A group of ranks. memory: bytes of a rank's cache, 32 blocks of 4 tokens, or half as many that are twice as long:
    two of the longest requests, or one that is guided. examples: of which each has some 14 steps."""

    settings: dict[str, Any]
    memory: int
    examples: int


TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"
THRESHOLD = "prefill_context_parallel_threshold"
GROUPS = {
    "tensor": Kind({TP: 2}, 33 * 1024, 8),
    "stages": Kind({PP: 2}, 33 * 1024, 4),
    "context": Kind({CP: 2, THRESHOLD: 6}, 17 * 2048, 4),
    "tensor and stages": Kind({TP: 2, PP: 2}, 33 * 512, 12),
    "tensor and context": Kind({TP: 2, CP: 2, THRESHOLD: 6}, 17 * 1024, 12),
}


@dataclass
class Stand:
    """The group, and the one device that it is compared with."""

    kind: Kind
    many: LLM
    one: LLM
    known: dict[tuple, list[int]] = field(default_factory=dict)
    beams: dict[tuple, list[list[int]]] = field(default_factory=dict)
    count: int = 0
    preemptions: int = 0

    def alone(self, key: tuple, make: Callable[[str], Request]) -> list[int]:
        """A request's tokens on one device, where nothing else runs."""
        if key not in self.known:
            [outcome] = Rig(self.one.engine).run(make("alone")).values()
            self.known[key] = outcome.tokens
        return self.known[key]

    def count_preemptions(self) -> None:
        """Listen beside the LLM, which keeps the statistics of its own requests alone."""
        inner = self.many.engine.scheduler.on_finish

        def note(request: Request, stats: RequestStats) -> None:
            self.preemptions += stats.preemptions
            inner(request, stats)

        self.many.engine.on_finish(note)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "tensor" else pytest.mark.thorough) for name in GROUPS],
)
def stand(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Stand]:
    settings = {"dtype": "float32", "device": "cpu", "debug_checks": True, "block_size": 4, "max_num_seqs": 6}
    settings |= {"max_num_batched_tokens": 24, "skip_tokenizer_init": True, "max_model_len": 64}
    folder, kind = tiny_model("llama"), GROUPS[request.param]
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(folder, **settings, kv_cache_memory=33 * 2048) as one,
    ):
        patch.setattr(leader, "Dealer", partial(Dealer, least_piece=2))
        with LLM(folder, **settings, kv_cache_memory=kind.memory, **kind.settings) as many:
            stand = Stand(kind, many, one)
            stand.count_preemptions()
            yield stand


@dataclass
class Expected:
    """What must come out for one request, and what has."""

    tokens: list[int]
    logprobs: bool
    got: list[int] = field(default_factory=list)
    ended: str | None = None


class GroupMachine(RuleBasedStateMachine):
    def __init__(self, stand: Stand) -> None:
        super().__init__()
        self.stand, self.engine = stand, stand.many.engine
        self.expected: dict[str, Expected] = {}

    @rule(
        prompt=st.sampled_from(PROMPTS),
        kind=st.integers(0, len(KINDS) - 1),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.sampled_from([3, 5, 14, 22]),
        ends=st.booleans(),
    )
    def add(self, prompt, kind, n, max_tokens, ends) -> None:
        """n: completions of the same prompt, which share its blocks."""
        self.stand.count += 1
        stops = ENDS if ends else frozenset()
        for seed in range(n):

            def make(name: str, seed: int = seed) -> Request:
                params = {**KINDS[kind]}
                mask = OneOf(3, 5, 140, 250) if params.pop("mask", False) else None
                return ask(name, prompt, max_tokens=max_tokens, seed=seed, mask=mask, stop_ids=stops, **params)

            tokens = self.stand.alone((prompt, kind, seed, max_tokens, ends), make)
            name = f"{self.stand.count} {seed}"
            self.expected[name] = Expected(tokens, "logprobs" in KINDS[kind])
            self.engine.add(make(name))

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def abort(self, data) -> None:
        name = data.draw(st.sampled_from(self._open()))
        assert self.engine.abort(name)
        self.expected[name].ended = "abort"

    @rule(times=st.integers(1, 9))
    def step(self, times) -> None:
        for _ in range(times):
            if not self.engine.has_work:
                return
            for event in self.engine.step():
                expected = self.expected[event.request_id]
                assert expected.ended is None, "an event came after the end"
                if event.token_id >= 0:
                    expected.got.append(event.token_id)
                    assert (event.logprobs is not None) == expected.logprobs
                expected.ended = event.finish_reason
                assert event.error is None

    @precondition(lambda self: not self._open() and not self.engine.has_work)
    @rule(prompt=st.sampled_from(PROMPTS[:4]), width=st.sampled_from([2, 3]), length=st.sampled_from([2, 6]))
    def beams(self, prompt, width, length) -> None:
        params = BeamSearchParams(beam_width=width, max_tokens=length, stop_token_ids=sorted(ENDS))
        asked, key = {"prompt_token_ids": list(prompt)}, (prompt, width, length)
        if key not in self.stand.beams:
            self.stand.beams[key] = _beams(self.stand.one, asked, params)
        assert _beams(self.stand.many, asked, params) == self.stand.beams[key]

    @invariant()
    def tokens_are_those_of_one_device(self) -> None:
        for expected in self.expected.values():
            assert expected.got == expected.tokens[: len(expected.got)]
            if expected.ended not in (None, "abort"):
                assert expected.got == expected.tokens

    def teardown(self) -> None:
        """Everything ends, and nothing is left behind."""
        for _ in range(400):
            self.step(1)
        self.tokens_are_those_of_one_device()
        assert not self._open()
        assert not self.engine.has_work
        scheduler = self.engine.scheduler
        assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages
        assert scheduler.slots.num_free == self.engine.config.max_num_seqs

    def _open(self) -> list[str]:
        return [name for name, expected in self.expected.items() if expected.ended is None]


def _beams(llm: LLM, asked: dict[str, list[int]], params: BeamSearchParams) -> list[list[int]]:
    [output] = llm.beam_search([asked], params)  # type: ignore[list-item]
    return [list(sequence.token_ids) for sequence in output.outputs]


@pytest.mark.dealt
def test_a_group_serves_whatever_comes_as_one_device_does(stand: Stand) -> None:
    run_state_machine_as_test(lambda: GroupMachine(stand), settings=machine_settings(stand.kind.examples, steps=14))
    crowd = GroupMachine(stand)  # of requests that the cache is too small for, whatever examples there were
    for kind in (1, 2):
        crowd.add(prompt=LONG, kind=kind, n=3, max_tokens=22, ends=False)
    crowd.teardown()
    assert stand.preemptions > 0, "the cache was never too small"
    assert len(stand.known) > 2 * stand.kind.examples
    assert stand.beams
