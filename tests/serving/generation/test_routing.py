"""The rule by which requests find a replica, against its own words and another picture of what is cached where."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.plan.routing import BLOCK, FACTOR, WORTH, Router

REPLICAS = 3
# Prompts that share beginnings: each block is one of two.
PROMPTS = st.lists(st.sampled_from([1, 2]), max_size=6).map(lambda blocks: [b for b in blocks for _ in range(BLOCK)])
LOADS = st.dictionaries(st.integers(0, REPLICAS - 1), st.integers(0, 2000).map(float), min_size=1)
SENT = st.tuples(PROMPTS, st.sampled_from(["", "a"]), LOADS)


def common(one: list[int], other: list[int]) -> int:
    """Tokens in whole blocks with which both begin."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // BLOCK * BLOCK


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(SENT, st.integers(0, REPLICAS - 1)), max_size=20))
def test_the_rule(steps: list[tuple[list[int], str, dict[int, float]] | int]) -> None:
    """An available replica, never one that is too loaded, the longest beginning among the others; a replica that died
    has nothing."""
    router = Router(REPLICAS)
    sent: dict[int, list[tuple[str, list[int]]]] = {replica: [] for replica in range(REPLICAS)}
    for step in steps:
        if isinstance(step, int):
            router.forget(step)
            sent[step].clear()
            continue
        prompt, salt, loads = step
        hits = {r: max((common(prompt, p) for s, p in sent[r] if s == salt), default=0) for r in loads}
        chosen = router.choose(prompt, salt, loads)
        assert chosen in loads
        least = min(loads.values())
        assert loads[chosen] <= FACTOR * least + WORTH * hits[chosen]
        fit = [r for r in loads if loads[r] <= FACTOR * least + WORTH * hits[r]]
        assert hits[chosen] == max(hits[r] for r in fit)
        if not any(hits.values()):
            assert loads[chosen] == least
        sent[chosen].append((salt, prompt))


def test_requests_of_no_common_beginning_go_round() -> None:
    router = Router(2)
    assert [router.choose([n] * 100, "", {0: 0.0, 1: 0.0}) for n in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_conversation_stays_until_its_replica_has_far_more_to_do() -> None:
    router = Router(2)
    first = router.choose([7] * 320, "", {0: 0.0, 1: 0.0})
    again = [7] * 320 + [8] * 64
    other = 1 - first
    assert router.choose(again, "", {first: 1280.0, other: 0.0}) == first
    assert router.choose(again, "", {first: 5000.0, other: 0.0}) == other
    assert router.choose(again, "another tenant", {first: 10.0, other: 0.0}) == other


def test_what_is_known_is_bounded_and_a_prompts_beginning_outlives_its_end() -> None:
    router = Router(1)
    router.forget(0, room=4 * BLOCK)
    long = [token for block in range(6) for token in [block] * BLOCK]
    router.choose(long, "", {0: 0.0})
    assert router.cached(0, long, "") == 4 * BLOCK
    router.choose([9] * 2 * BLOCK, "", {0: 0.0})
    assert router.cached(0, long, "") == 2 * BLOCK
    router.forget(0, room=0)
    router.choose(long, "", {0: 0.0})
    assert router.cached(0, long, "") == 0


def test_load_stays_even_under_a_beginning_that_all_share() -> None:
    """Requests that begin with one system prompt of 64 tokens, each of 264 in all, of which none ends."""
    router, loads = Router(4), dict.fromkeys(range(4), 0.0)
    for number in range(400):
        loads[router.choose([1] * 64 + [number + 2] * 200, "", loads)] += 264
    assert max(loads.values()) <= FACTOR * min(loads.values()) + WORTH * 64 + 264
