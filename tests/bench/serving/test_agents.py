"""W6 against servers: all get the same bytes, turns follow one another, and figures are those of the turns."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.traffic import Ask
from ridgeline_bench.results import read
from ridgeline_bench.serving.agents import AgentAsking, AgentContents, AgentTurn, figures, play, seen_tokens
from ridgeline_bench.serving.outcome import Outcome
from ridgeline_bench.serving.server import Server
from ridgeline_bench.serving.sessions import MOST_TURNS, Agents
from tests.bench.serving.scripted_server import ScriptedServer
from tests.command import run_here

SIZES = {"instructions": 40, "task": 20, "result": 12, "answer": 4}
SMALL = Agents(sessions=3, turns=4, rate=float("inf"), time_scale=1e-4, seed=5, branches=0.7, branch_turns=2, **SIZES)
ASKING = AgentAsking(fields={"ignore_eos": None}, timeout=60.0)


def all_asks(agents: Agents) -> list[Ask]:
    """Every request of the sessions, as if each answer came at once."""
    found, waiting = list[Ask](), list(agents.begin())
    while waiting:
        ask = waiting.pop()
        found.append(ask)
        waiting += agents.after(ask, ask.at)
    return sorted(found, key=lambda ask: ask.number)


def played(agents: Agents, **facts: object) -> tuple[list[AgentTurn], list[dict[str, object]]]:
    with ScriptedServer(**facts) as scripted:  # type: ignore[arg-type]
        turns = asyncio.run(play(agents, Server.ask(scripted.url, {}), ASKING))
        return turns, [seen.body for seen in scripted.seen]


def test_every_server_gets_the_same_bytes_which_are_those_of_the_simulator() -> None:
    turns, bodies = played(SMALL)
    _, others = played(SMALL)
    asks = all_asks(SMALL)
    assert sorted(map(json.dumps, bodies)) == sorted(map(json.dumps, others))
    assert sorted(turn.ask.number for turn in turns) == [ask.number for ask in asks]
    assert Counter(len(body["prompt"]) for body in bodies) == Counter(ask.length for ask in asks)  # type: ignore[arg-type]
    assert Counter(body["max_tokens"] for body in bodies) == Counter(ask.answer.tokens for ask in asks)


def test_a_turn_begins_with_the_turn_before_and_leaves_after_it() -> None:
    turns, _ = played(SMALL)
    contents, by_number = AgentContents(SMALL.seed, 1000), {turn.ask.number: turn for turn in turns}
    for ask, outcome in turns:
        before = by_number.get(ask.number - 1) or by_number.get(ask.number - SMALL.sessions * MOST_TURNS - 1)
        if ask.number % MOST_TURNS == 0:
            assert seen_tokens(ask) == SMALL.instructions * (ask.session > 0)
            continue
        assert before is not None
        assert outcome.sent >= before.outcome.end
        known = before.ask.length
        assert contents.tokens(ask.prompt)[:known] == contents.tokens(before.ask.prompt)
        assert seen_tokens(ask) == known


def test_figures_are_those_of_the_turns() -> None:
    agents = Agents(sessions=2, turns=2, time_scale=0.0, rate=float("inf"), branches=0.0, **SIZES)
    turns = []
    for ask in all_asks(agents):
        session, turn = ask.session, ask.number % MOST_TURNS
        sent, failed = 10.0 * turn + session, session == 1 and turn == 1
        outcome = Outcome(
            index=ask.number,
            due=sent,
            free=sent,
            sent=sent,
            end=sent + 4 + turn,
            asked_tokens=5,
            moments=[sent + 1 + turn],
            counts=[5],
            prompt_tokens=100,
            cached_tokens=50 * turn,
            output_tokens=5,
            error="timeout" if failed else "",
        )
        turns.append(AgentTurn(ask, outcome))
    found = figures(agents, turns, price=3600.0)
    assert (found.sessions, found.completed, found.requests, dict(found.errors)) == (2, 1, 4, {"timeout": 1})
    assert found.duration == 16.0  # the last one ends at 10 + 1 + 5
    assert found.session_time.p50 == 15_000  # the first session's, from 0 to 15
    assert found.ttft_by_turn == {0: 1000.0, 1: 2000.0}
    assert found.hit_rate == pytest.approx(50 / 300)
    assert found.ideal_hit_rate == pytest.approx(sum(seen_tokens(t.ask) for t in turns if not t.outcome.error) / 300)
    assert found.output_rate == pytest.approx(15 / 16)
    assert found.cost_per_session == pytest.approx(16.0)


@pytest.mark.dealt
def test_our_own_server_finds_what_can_be_found(tmp_path: Path) -> None:
    out, sizes = tmp_path / "w6.jsonl", "64,32,24,4"
    command = [
        sys.executable, "-m", "ridgeline", "bench", "serve", "--start", "ridgeline", "--agents", "3", "--turns", "3",
        "--time-scale", "0.001", "--agent-sizes", sizes, "--price-per-hour", "2", "--out", str(out), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    agents = Agents(sessions=3, turns=3, rate=float("inf"), **Agents.sizes(sizes))
    assert (found["completed"], found["errors"], found["requests"]) == (3, {}, len(all_asks(agents)))
    assert 0.8 * found["ideal_hit_rate"] <= found["hit_rate"] <= found["ideal_hit_rate"] + 0.02  # chance finds some
    assert found["ttft_by_turn"].keys() >= {"0", "1", "2"}
    assert found["cost_per_session"] == pytest.approx(2 * found["duration"] / 3600 / 3)
    metrics = {record.metric: record for record in read([out])}
    assert metrics["session p50"].value == pytest.approx(found["session_time"]["p50"])
    assert {"ttft p99", "ttft of turn 1 p50", "cached", "ideal", "output", "session price"} <= metrics.keys()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--agent-sizes", "1,2"), "INSTRUCTIONS,TASK,RESULT,ANSWER"),
        (("--rate", "1,2"), "one --rate"),
        (("--endpoint", "chat"), "--agents takes no --endpoint; leave it out"),
        (("--num-requests", "5"), "--agents takes no --num-requests; leave it out"),
        (("--warmup", "0", "--slo", "ttft=9"), "--agents takes no --slo, --warmup; leave them out"),
        (("--input-len", "9", "--track", "jsonl"), "--agents takes no --input-len, --track; leave them out"),
        (("--time-scale", "-1"), "a time scale from 0"),
    ],
)
def test_a_mistake_is_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    done = run_here("bench", "serve", "--agents", 2, *flags)
    assert done.returncode == 2
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("facts", "sentence"), [({"vocab_size": 0}, "--vocab-size"), ({"max_model_len": 50}, "--turns")]
)
def test_sessions_that_a_server_could_not_run_are_refused(facts: dict[str, int], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        played(SMALL, **facts)


def test_options_of_agents_are_refused_without_them() -> None:
    done = run_here("bench", "serve", "--turns", 3)
    assert done.returncode == 2
    assert "--turns needs --agents; leave it out" in done.stderr
