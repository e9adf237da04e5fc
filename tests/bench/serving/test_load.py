"""The load generator against a server whose every answer is scripted: what it reports is known beforehand."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import read
from ridgeline_bench.serving.figures import Point, Slo, point
from ridgeline_bench.serving.outcome import Outcome
from ridgeline_bench.serving.run import Run
from ridgeline_bench.serving.session import Sending, Session
from ridgeline_bench.serving.stream import Stream
from ridgeline_bench.serving.work import Lengths, Work
from tests.bench.serving.scripted_server import ScriptedServer

LATE = 0.15  # seconds by which a busy machine may be late; never early


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as found:
        yield found


def scripts(*found: dict[str, Any], apart: float = 0.02) -> Work:
    """A trace in which each request's prompt is its script."""
    rows = tuple(
        {
            "timestamp": apart * n,
            "prompt": json.dumps(script),
            "output_length": sum(tokens for tokens, _ in script.get("pieces", [])) or 1,
        }
        for n, script in enumerate(found)
    )
    return Work(trace=rows)


def session(server: ScriptedServer, work: Work, *rates: float, **changes: Any) -> Session:
    options: dict[str, Any] = {"slo": Slo({}), "fields": {"ignore_eos": True}, "timeout": 1.0, **changes}
    until = options.pop("until", math.inf)
    return Session.begin(server.url, "", work, Sending(rates=rates or (0.0,), **options), until)


def measure(server: ScriptedServer, work: Work, *rates: float, **changes: Any) -> Point:
    (found,) = session(server, work, *rates, **changes).measure()
    return found


STEADY = {"wait": 0.1, "pieces": [(1, 0.03)] * 8}


def test_times_are_those_the_server_kept_to(server: ScriptedServer) -> None:
    found = measure(server, scripts(*[STEADY] * 6))
    assert (found.num_completed, found.errors) == (6, {})
    for value in found.latencies["ttft"].samples:
        assert 0.1 <= value / 1e3 <= 0.1 + LATE
    written = [b - a for seen in server.seen for a, b in zip(seen.written, seen.written[1:], strict=False)]
    assert len(found.latencies["itl"].samples) == len(written) == 6 * 7
    assert found.latencies["itl"].p50 == pytest.approx(1e3 * statistics.median(written), abs=5)
    assert found.latencies["tpot"].mean == pytest.approx(1e3 * statistics.mean(written), abs=2)
    assert found.output_rate * found.duration == pytest.approx(48)
    assert found.total_rate * found.duration == pytest.approx(48 + 60), "prompt tokens as usage tells them"
    assert found.cached == pytest.approx(0.4)
    assert 0.1 + 5 * 0.02 + 7 * 0.03 <= found.duration <= 0.1 + 5 * 0.02 + 8 * 0.03 + 3 * LATE
    assert found.exact


@pytest.mark.parametrize("counts", ["running", "ids"])
def test_tokens_that_arrive_together_share_their_wait(server: ScriptedServer, counts: str) -> None:
    script = {"wait": 0.02, "pieces": [(2, 0.06), (3, 0.06), (3, 0.0)], "counts": counts}
    found = measure(server, scripts(script))
    assert found.exact
    assert len(found.latencies["itl"].samples) == 6, "the two that came first waited for nothing but the first token"
    assert found.latencies["itl"].mean == pytest.approx(20, abs=8)
    assert found.latencies["tpot"].p50 == pytest.approx(20, abs=8), "120 ms for the six tokens after the first two"


@pytest.mark.parametrize(("counts", "tokens"), [("final", 6), ("none", 2)])
def test_where_the_server_does_not_count_pieces_are_counted_and_it_is_said(
    server: ScriptedServer, counts: str, tokens: int
) -> None:
    script = {"wait": 0.02, "pieces": [(3, 0.03), (3, 0.0)], "counts": counts}
    found = measure(server, scripts(script))
    assert not found.exact
    assert found.output_rate * found.duration == pytest.approx(tokens)
    assert len(found.latencies["itl"].samples) == 1
    assert any("per piece" in warning for warning in found.warnings)


def test_every_failure_is_counted_by_its_kind_and_in_no_latency(server: ScriptedServer) -> None:
    one = {"wait": 0.01, "pieces": [(1, 0.01), (1, 0.01)]}
    kinds: dict[str, dict[str, Any]] = {
        "HTTP 429": {"status": 429},
        "HTTP 500": {"status": 500},
        "disconnected": {**one, "end": "cut"},
        "cut short": {**one, "end": "undone"},
        "stream error": {**one, "end": "error"},
        "malformed": {**one, "end": "nonsense"},
        "timeout": {**one, "end": "stall"},
        "empty": {"pieces": []},
    }
    work = scripts(one, *kinds.values(), {"status": 429}, one)
    short = {"timestamp": 0.3, "prompt": json.dumps(one), "output_length": 5}
    found = measure(server, replace(work, trace=(*work.trace, short)))
    assert found.errors == {**dict.fromkeys(kinds, 1), "HTTP 429": 2, "wrong length": 1}
    assert (found.num_requests, found.num_completed) == (12, 2)
    assert len(found.latencies["ttft"].samples) == len(found.latencies["e2e"].samples) == 2
    assert found.output_rate * found.duration == pytest.approx(4)
    assert found.duration >= 1.0, "the time until the last one was given up"
    told = "\n".join(found.warnings)
    assert "scripted 429" in told
    assert "scripted failure" in told
    assert "2 tokens instead of 5" in told


def test_nobody_listening_is_a_failure_of_each_request(server: ScriptedServer) -> None:
    begun = session(server, scripts(STEADY, STEADY))
    server.stop()  # it was asked while it was there
    (found,) = begun.measure()
    assert found.errors == {"no connection": 2}
    assert found.goodput is None


def test_requests_leave_at_their_time_though_the_server_answers_none(server: ScriptedServer) -> None:
    slow = {"wait": 0.6, "pieces": [(1, 0.0)]}
    found = measure(server, scripts(*[slow] * 10, apart=0.03))
    arrived = [seen.arrived - server.seen[0].arrived for seen in server.seen]
    for n, at in enumerate(arrived):
        assert at == pytest.approx(0.03 * n, abs=LATE)
    assert found.peak == server.most_open == 10
    assert found.offered == pytest.approx(10 / 0.27, rel=0.2)


def test_at_most_so_many_are_open_and_waiting_for_a_place_is_not_lateness(server: ScriptedServer) -> None:
    slow = {"wait": 0.1, "pieces": [(1, 0.0)]}
    found = measure(server, scripts(*[slow] * 6, apart=0.001), max_concurrency=2)
    assert found.peak == server.most_open == 2
    assert found.num_completed == 6
    assert found.lateness.p99 < 1e3 * LATE
    assert found.latencies["ttft"].p99 < 1e3 * (0.1 + LATE), "it counts from the moment the request left"


def test_goodput_counts_requests_that_meet_every_bound(server: ScriptedServer) -> None:
    quick = {"wait": 0.02, "pieces": [(1, 0.01)] * 5}
    late_start = {"wait": 0.3, "pieces": [(1, 0.01)] * 5}
    one_pause = {"wait": 0.02, "pieces": [(1, 0.01), (1, 0.01), (1, 0.2), (1, 0.01)]}
    work = scripts(quick, late_start, one_pause, quick, {"status": 503})
    found = measure(server, work, slo=Slo.parse("ttft=150,itl=100,e2e=2000"))
    assert found.goodput is not None
    assert found.goodput * found.duration == pytest.approx(2)
    assert found.num_completed == 4
    everything = measure(server, work, slo=Slo.parse("e2e=2000"))
    assert everything.goodput is not None
    assert everything.goodput * everything.duration == pytest.approx(4)


def test_processes_share_the_work_and_each_request_is_sent_once(server: ScriptedServer) -> None:
    server.default = {"wait": 0.05, "pieces": [(1, 0.01)] * 3}
    work = Work(seed=3, count=20, input_len=Lengths(3, 9), output_len=Lengths(3, 3))
    bodies = []
    for processes, seed in ((1, 3), (3, 3), (1, 4)):
        server.seen.clear()
        found = measure(server, replace(work, seed=seed), 200.0, processes=processes, max_concurrency=6)
        assert found.num_completed == 20
        bodies.append(Counter(json.dumps(seen.body, sort_keys=True) for seen in server.seen))
    assert bodies[0] == bodies[1]
    assert bodies[0] != bodies[2]
    assert max(bodies[0].values()) == 1
    assert server.most_open <= 6


def test_what_a_client_process_says_arrives_though_its_writes_are_interrupted() -> None:
    code = (
        "import signal; from ridgeline_bench.serving.child import _say; signal.signal(signal.SIGALRM, lambda *_: None);"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01); _say('x' * 2_000_000)"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        time.sleep(1.0)  # the pipe is full, and alarms ring
        assert len(process.stdout.read()) == 2_000_003


def test_connections_are_used_again_and_a_body_without_length_ends_with_its_connection(server: ScriptedServer) -> None:
    one = {"pieces": [(1, 0.0)]}
    found = measure(server, scripts(*[one] * 8, apart=0.05))
    asked = server.connections
    assert found.num_completed == 8
    assert asked < 3 + 8, "three for the questions before"
    unframed = measure(server, scripts(*[{**one, "end": "unframed"}] * 3, apart=0.05))
    assert unframed.num_completed == 3


def test_a_chat_gets_messages_and_the_key(server: ScriptedServer) -> None:
    server.default = {"pieces": [(1, 0.0)] * 2}
    work = Work(count=3, input_len=Lengths(7, 7), output_len=Lengths(2, 2), prefix_tokens=5, prefix_groups=2, chat=True)
    found = measure(server, work, math.inf, api_key="secret", fields={"temperature": 0.5})
    assert found.num_completed == 3
    for seen in server.seen:
        assert "POST /v1/chat/completions " in seen.headers
        assert "Authorization: Bearer secret" in seen.headers
        assert [len(m["content"].split()) for m in seen.body["messages"]] == [5, 7]
        assert (seen.body["temperature"], seen.body["max_completion_tokens"]) == (0.5, 2)


def test_work_that_cannot_fit_or_whose_ids_are_unknown_is_refused_before_any_request() -> None:
    with ScriptedServer(vocab_size=0, max_model_len=100) as server:
        with pytest.raises(InvalidConfig, match="--vocab-size"):
            session(server, Work(count=1), 1.0)
        long = Work(count=30, input_len=Lengths(60, 90), output_len=Lengths(20, 20), vocab_size=50)
        with pytest.raises(InvalidConfig, match="context has 100"):
            session(server, long, 1.0)
        assert not server.seen


# ---- what is asked, and when: the distributions themselves ---------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_have_the_mean_and_the_spread_asked_for(burstiness: float) -> None:
    work = Work(count=20_000, burstiness=burstiness, vocab_size=9)
    gaps = np.diff([0.0, *work.arrivals(8.0)])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    # a gamma distribution of shape k has a coefficient of variation of 1/√k
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05, abs=1e-6)


def test_duration_bounds_departures_and_rates_share_one_pattern() -> None:
    work = Work(duration=50.0)
    slow, fast = work.arrivals(2.0), work.arrivals(4.0)
    assert max(slow) < 50
    assert len(slow) == pytest.approx(100, abs=40)
    assert fast[: len(slow)] == pytest.approx([at / 2 for at in slow])


def test_lengths_follow_their_distribution() -> None:
    def drawn(text: str) -> np.ndarray:
        work = Work(input_len=Lengths.parse(text, "--input-len"))
        return np.array([work.sizes(n)[0] for n in range(4000)])

    assert set(drawn("7")) == {7}
    assert (drawn("3:5").min(), drawn("3:5").max()) == (3, 5)
    lengths = drawn("400,200")
    assert lengths.mean() == pytest.approx(400, rel=0.03)
    assert lengths.std() == pytest.approx(200, rel=0.1)
    assert drawn("400,200,500").max() == 500


def test_prompts_are_new_at_every_rate_and_share_what_they_should() -> None:
    work = Work(count=40, input_len=Lengths(4, 4), prefix_tokens=6, prefix_groups=3, vocab_size=500)
    first, again, other = (work.requests(5.0, name) for name in ("a", "a", "b"))
    assert first == again
    assert [r.max_tokens for r in first] == [r.max_tokens for r in other]
    prefixes = [{tuple(r.prompt[:6]) for r in rs} for rs in (first, other)]
    assert [len(found) for found in prefixes] == [3, 3]
    assert not prefixes[0] & prefixes[1]
    assert len({tuple(r.prompt) for r in first}) == 40
    assert all(len(r.prompt) == r.prompt_tokens == 10 and max(r.prompt) < 500 for r in first)


# ---- reading -------------------------------------------------------------------------------------------------------

EVENTS = (
    ': hello\r\n\r\ndata: {"choices":[{"text":"é"}],"usage":{"completion_tokens":1}}\r\n\r\n'
    'data: {"choices":[{"text":""}],"usage":{"completion_tokens":1}}\n\n'
    'event: x\ndata: {"choices":[{"text":"bc"}],"usage":{"completion_tokens":3}}\n\n'
    'data: {"choices":[],"usage":{"completion_tokens":4,"prompt_tokens":9}}\n\ndata: [DONE]\n\n'
).encode()


@settings(max_examples=60)
@given(st.sets(st.integers(1, len(EVENTS) - 1)))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: set[int]) -> None:
    stream, places = Stream(), [0, *sorted(cuts), len(EVENTS)]
    for a, b in itertools.pairwise(places):
        stream.feed(EVENTS[a:b], float(b))
    assert stream.failure is None
    assert (stream.counts, stream.output_tokens, stream.prompt_tokens) == ([1, 2], 4, 9)
    assert stream.ended
    assert stream.exact


@settings(max_examples=30)
@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50))
def test_percentiles_are_numpys(seconds: list[float]) -> None:
    outcomes = [
        Outcome(index=n, due=0, free=0, sent=0, end=s, asked_tokens=1, moments=[s], counts=[1], output_tokens=1)
        for n, s in enumerate(seconds)
    ]
    e2e = point(1.0, Run(outcomes, 0.0), Slo({})).latencies["e2e"]
    expected = np.percentile([1e3 * s for s in seconds], [50, 90, 99], method="inverted_cdf")
    assert list(e2e[1:4]) == pytest.approx(list(expected))


def test_a_late_or_busy_client_is_said_so() -> None:
    def warned(late: float, busy: float) -> list[str]:
        one = Outcome(
            index=0, due=0, free=0, sent=late, end=1, asked_tokens=1, moments=[0.5], counts=[1], output_tokens=1
        )
        return list(point(5.0, Run([one], busy), Slo({})).warnings)

    assert not warned(0.001, 0.2)
    assert "40 ms late" in warned(0.04, 0.2)[0]
    assert "95 %" in warned(0.001, 0.95)[0]


# ---- the command ---------------------------------------------------------------------------------------------------


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", "bench", "serve", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**environment, "COLUMNS": "120"}, check=False
    )


def test_a_curve_is_printed_drawn_and_recorded(server: ScriptedServer, tmp_path: Path) -> None:
    server.default = {"wait": 0.03, "pieces": [(1, 0.01)] * 4}
    out, svg = tmp_path / "r.jsonl", tmp_path / "curve.svg"
    done = bench(
        "--url", server.url + "/v1", "--rate", "20,80", "--num-requests", 12, "--input-len", "2:6", "--output-len", 4,
        "--slo", "ttft=500", "--out", out, "--plot", svg, "--track", "jsonl", "--track-to", tmp_path / "runs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "scripted on test 7" in done.stdout
    assert len(server.seen) == 2 + 2 * 12, "two to warm up"
    records = read([out])
    assert {r.workload for r in records} == {"serve completions 2:6>4 20/s", "serve completions 2:6>4 80/s"}
    figures = {r.metric: r for r in records if r.workload.endswith(" 80/s")}
    assert (figures["ttft p50"].engine, figures["ttft p50"].model, figures["ttft p50"].version) == (
        "test", "scripted", "7"
    )  # fmt: skip
    assert len(figures["ttft p50"].samples) == 12
    assert 30 <= figures["ttft p50"].value <= 30 + 1e3 * LATE
    assert figures["goodput"].value == figures["requests"].value > 0
    assert figures["failed"].value == 0
    assert ET.fromstring(svg.read_text()).tag.endswith("svg")
    [kept] = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (kept / "run.jsonl").read_text().splitlines()]
    rates = [event["values"]["test 7/rate"] for event in events if event["event"] == "metrics"]
    assert rates == [20, 80]
    assert events[2]["values"]["test 7/ttft p50"] == figures["ttft p50"].value
    assert (kept / "artifacts" / "curve.svg").read_text() == svg.read_text()


def test_failures_make_the_exit_code_1_and_json_is_alone_on_standard_output(
    server: ScriptedServer, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "\n".join(json.dumps(row) for row in scripts({"pieces": [(1, 0.0)]}, {"status": 429}).trace) + "\n"
    )
    done = bench("--url", server.url, "--trace", trace, "--warmup", 0, "--json")
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)[0]["points"]
    assert (found["errors"], found["completed"], found["requests"]) == ({"HTTP 429": 1}, 1, 2)
    assert "1 of 2 failed: HTTP 429" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--url", "http://127.0.0.1:9"], "is the server up?"),
        (["--url", "127.0.0.1"], "http://"),
        (["--rate", "0"], "'0'"),
        (["--rate", "inf", "--duration", "3"], "--num-requests"),
        (["--input-len", "9:3"], "9:3"),
        (["--slo", "speed=3"], "speed=3"),
        (["--shared-prefix", "x"], "'x'"),
        (["--endpoint", "embeddings"], "embeddings"),
        (["--trace", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--extra", "[1]"], "[1]"),
        (["--plot", "x.doc"], "x.doc"),
        (["--search-slo", "ttft=1", "--rate", "inf"], "one finite --rate"),
        (["--search-slo", "ttft=1", "--rate", "1,2"], "one finite --rate"),
        (["--search-slo", "ttft=1", "--rate", "1", "--slo", "itl=2"], "leave --slo out"),
        (["--search-slo", "speed=3", "--rate", "1"], "--search-slo knows"),
    ],
)
def test_mistakes_give_one_sentence(arguments: list[str], word: str) -> None:
    from typer.testing import CliRunner

    from ridgeline.cli.bench import app

    done = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(done.exception, InvalidConfig), done.output
    assert word in str(done.exception)
