"""Sessions that are expected back: what their last turn left outlives other idle blocks, within bounds, and no request
waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.settings.host_tier import SessionBounds
from ridgeline.engine.cache.plain_pool import pool_of
from ridgeline.engine.cache.pool import PINNED
from ridgeline.engine.cache.sessions import EARLY, HASHES, Sessions
from tests.driving import Rig, ask
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import layout_of
from tests.test_host_tier import PROMPTS, room
from tests.test_kv_disk import disk_of, served, written

PAGES = 32  # of the desk, with 4 tokens each


def sessions_of(desk: Desk) -> Sessions:
    assert desk.scheduler.cache.sessions is not None
    return desk.scheduler.cache.sessions


def run(desk: Desk, name: str, prompt: range, **fields: Any) -> int:
    """Run a request of 3 output tokens, and return the prompt tokens that it found in the cache."""
    before = desk.scheduler.cache.hit_tokens
    desk.add(replace(make_request(name, prompt, max_tokens=3), **fields))
    desk.finish()
    return desk.scheduler.cache.hit_tokens - before


def crowd(desk: Desk, count: int = 8) -> None:
    """Run requests that need more pages than there are."""
    for n in range(count):
        run(desk, f"crowd {n} {len(desk.got)}", range(1000 + 100 * n, 1016 + 100 * n))


@pytest.mark.parametrize("name", ["a name", ""])
def test_what_a_session_left_outlives_other_requests(name: str) -> None:
    for keep in (60.0, 0.0):
        desk = Desk()
        run(desk, "turn 1", range(17), keep=keep, session=name)
        crowd(desk)
        assert run(desk, "turn 2", range(24), keep=keep, session=name) // 16 == (keep > 0)


def test_a_session_goes_when_its_time_is_over() -> None:
    desk, now = Desk(sessions=SessionBounds(ttl=30.0)), [0.0]
    sessions_of(desk)._clock = lambda: now[0]
    run(desk, "turn 1", range(17), keep=60.0)
    now[0] = 29.0
    crowd(desk)
    assert len(sessions_of(desk)) == 1
    now[0] = 31.0  # the operator's bound is shorter than what the request asks for
    crowd(desk)
    assert not len(sessions_of(desk))
    assert run(desk, "turn 2", range(24)) == 0


def test_a_turn_takes_the_place_of_the_one_before() -> None:
    desk = Desk()
    for turn in range(4):
        run(desk, f"turn {turn}", range(17 + turn), keep=60.0)
    assert len(sessions_of(desk)) == 1


def test_a_clients_sessions_keep_no_more_than_its_share() -> None:
    desk = Desk(sessions=SessionBounds(share=0.25))
    run(desk, "other", range(500, 517), keep=60.0, owner="other")
    for n in range(6):
        run(desk, f"mine {n}", range(40 * n, 40 * n + 17), keep=60.0, owner="me")
        assert sessions_of(desk)._pages[0]["me"] <= PAGES // 4
        assert sessions_of(desk)._pages[0].total() <= PAGES // 2
    crowd(desk)
    assert run(desk, "other again", range(500, 520), owner="other") >= 16
    assert run(desk, "the newest", range(200, 220), owner="me") >= 16
    assert run(desk, "the oldest", range(20), owner="me") == 0


def test_pages_that_a_clients_sessions_share_count_once() -> None:
    """Six sessions begin with the same four blocks and go on with two of their own."""
    desk, common = Desk(sessions=SessionBounds(share=0.5)), list(range(16))
    for n in range(6):
        prompt = [*common, *range(100 + 10 * n, 105 + 10 * n)]
        desk.add(replace(make_request(f"fork {n}", prompt, max_tokens=2), keep=60.0, session=f"{n}", owner="me"))
        desk.finish()
        pages = {page for session in sessions_of(desk)._of["me"] for page in session.pages[0]}
        assert sessions_of(desk)._pages[0]["me"] == len(pages) <= PAGES // 2
    assert len(sessions_of(desk)) == 6
    assert sum(len(session.pages[0]) for session in sessions_of(desk)._of["me"]) > PAGES
    for session in list(sessions_of(desk)._of["me"]):
        sessions_of(desk)._drop(session)
        left = {page for other in sessions_of(desk)._of.get("me", ()) for page in other.pages[0]}
        assert sessions_of(desk)._pages[0]["me"] == len(left)


def test_sessions_of_many_clients_keep_half_of_the_cache() -> None:
    desk = Desk()
    for n in range(12):
        run(desk, f"client {n}", range(40 * n, 40 * n + 17), keep=60.0, owner=f"client {n}")
        assert sessions_of(desk)._pages[0].total() <= PAGES // 2


def test_a_request_that_needs_the_whole_cache_runs_beside_sessions() -> None:
    desk = Desk(sessions=SessionBounds(share=1.0))
    for n in range(4):
        run(desk, f"session {n}", range(40 * n, 40 * n + 16), keep=60.0, owner=f"{n}")
    assert sessions_of(desk)._pages[0].total() >= PAGES // 3
    assert desk.scheduler.cache.pool.awaited_pages == 0, "admission counts no page of a session as taken"
    for n in range(2):
        desk.add(make_request(f"large {n}", range(1000 * n + 900, 1000 * n + 956), max_tokens=6))
    plan = desk.submit()
    assert plan is not None
    assert len(plan.rows.slots_R) == 2, "both start in the first plan, as without sessions"
    desk.finish()


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "pin", "back"]), st.integers(1, 6)), max_size=60))
def test_pins_change_which_pages_are_evicted_and_never_how_many_can_be_had(moves: list[tuple[str, int]]) -> None:
    """Beside a pool without pins that is asked for the same."""
    layout = layout_of(((None, 1),), 4, 13)
    pools, held = (pool_of(layout), pool_of(layout)), ([], [])  # type: ignore[var-annotated]
    for kind, number in moves:
        for pool, blocks in zip(pools, held, strict=True):
            if kind == "take":
                taken = pool.take([number])
                if taken is not None:
                    for block in taken[0]:
                        pool.mark_cached(0, block)
                    blocks.append(taken[0])
            elif kind == "give" and blocks:
                for block in blocks.pop(number % len(blocks)):
                    pool.release(0, block, 0)
        if kind == "pin" and held[1]:
            pools[1].await_return(number, [(0, block) for block in held[1][number % len(held[1])]], PINNED, number)
        elif kind == "back":
            pools[1].returned(number)
        assert pools[0].free_pages == pools[1].free_pages
        assert [len(blocks) for blocks in held[0]] == [len(blocks) for blocks in held[1]]
        assert pools[1].awaited_pages == 0


def test_hints_are_bounded_in_number() -> None:
    desk, now = Desk(), [0.0]
    sessions_of(desk)._clock = lambda: now[0]
    for n in range(300):
        now[0] += 1e-3
        run(desk, f"turn {n}", range(17), keep=3600.0, session="s")
    assert len(sessions_of(desk).due) < 100


def test_no_client_makes_others_sessions_go_by_many_keys_of_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.engine.cache.sessions.MOST_HASHES", 64)
    desk = Desk(pages=1025)
    run(desk, "theirs", range(500, 517), keep=60.0, owner="they", session="s")
    for n in range(30):
        run(desk, f"mine {n}", range(17), keep=60.0, owner="me", session=f"key {n}")
        assert sessions_of(desk)._pages[HASHES]["me"] <= 16
    assert {owner: len(own) for owner, own in sessions_of(desk)._of.items()} == {"they": 1, "me": 4}


def test_a_session_with_too_many_blocks_is_remembered_in_part_and_given_up_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ridgeline.engine.cache.sessions.MOST_HASHES", 12)
    desk = Desk()
    for n in range(3):
        run(desk, f"turn {n}", range(40 * n, 40 * n + 17), keep=60.0, session=f"key {n}")
        assert len(sessions_of(desk)) == 1
    sessions_of(desk).forget()
    assert not any(sessions_of(desk)._pages)
    assert not desk.scheduler.cache.pool._awaits
    assert not desk.scheduler.cache.pool._awaited


# ---- what the disk alone has -----------------------------------------------------------------------------------------


def _turns(own: Rig, now: list[float]) -> Sessions:
    """Run two turns of a session, 10 seconds one after the other, and others that evict what they left."""
    sessions = own.engine.scheduler.cache.sessions
    assert sessions is not None
    sessions._clock = lambda: now[0]
    for turn in range(2):
        now[0] += 10.0
        own.run(replace(ask(f"turn {turn}", PROMPTS[0]), session="s", keep=60.0))
    written(own)
    for n, prompt in enumerate(PROMPTS[1:]):
        own.run(ask(f"other {n}", prompt))
    written(own)
    return sessions


def _small(folder: Path, disk: Path) -> Any:
    """Return an engine whose host's memory has room for less than all prompts, and which keeps nothing for sessions."""
    return served(folder, disk, session_share=1e-9, kv_offloading_size=room(folder) / (1 << 30))


def test_a_session_is_read_from_the_disk_before_its_turn(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    now = [0.0]
    with _small(tiny_model("llama"), tmp_path / "kv") as own:
        sessions, disk = _turns(own, now), disk_of(own)
        now[0] += 10.0 * EARLY - 1.0
        written(own)
        assert disk.counts.ahead == 0, "not yet"
        now[0] += 1.5
        until = monotonic() + 60
        while own.engine.rest() and monotonic() < until:
            sleep(1e-3)
        assert disk.counts.ahead >= 30
        assert len(sessions) == 1
        hits = disk.counts.hit
        cached = own.engine.scheduler.cache.hit_tokens
        own.run(replace(ask("turn 3", PROMPTS[0]), session="s", keep=60.0))
        assert own.engine.scheduler.cache.hit_tokens - cached >= 30
        assert disk.counts.hit == hits, "the request has read nothing itself"
        assert not own.errors


def test_a_turn_that_comes_early_waits_for_what_is_being_read(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    now = [0.0]
    with _small(tiny_model("llama"), tmp_path / "kv") as own:
        sessions, disk = _turns(own, now), disk_of(own)
        now[0] += 9.0
        sessions.tick()
        assert disk.busy
        assert not disk.awaited
        reads = len(disk._fetches[0].reads)
        own.add(replace(ask("turn 3", PROMPTS[0]), session="s", keep=60.0))
        assert disk.awaited
        assert len(disk._fetches) == 1, "nothing is read twice"
        assert len(disk._fetches[0].reads) == reads
        own.run()
        assert disk.counts.ahead == 0
        assert disk.counts.hit >= 30
        assert not own.errors
