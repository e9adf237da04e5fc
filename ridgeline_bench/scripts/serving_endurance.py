"""A check that the server keeps its promises, on the embedded model: streams, storms, deaths, and its cost.

    python -m ridgeline_bench.scripts.serving_endurance [SCENARIO …] [--out FILE]

    streams     300 concurrent streams: each gets every token, and its end
    storm       1,000 requests of every kind at once, half of them cut at random points, 20 times over: afterwards
                every KV block is free, and no request, descriptor or memory is left behind
    kill        kill -9 of the engine, and of an API server, while 64 streams run: all of them end, and soon; new
                streams run again
    drain       SIGTERM while 64 streams run: none is lost, new ones are sent away, and the exit code is 0
    throughput  64 streams over HTTP beside `LLM().generate` on the same work, each in its own process, in turn

The exit code is 1 if a promise is broken. Figures are appended to benchmarks/results/serving-cpu.jsonl. Run it alone:
the load, the API server and the engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from ridgeline.version import __version__
from ridgeline_bench.child import percentile
from ridgeline_bench.results import Record, append, host
from ridgeline_bench.scripts.served import PATIENCE, Broken, Served, allow_descriptors, descriptors, promise, resident
from ridgeline_bench.serving.client import Address, Client, Disconnected
from ridgeline_bench.serving.stream import Stream

OUT = Path("benchmarks/results/serving-cpu.jsonl")
FLAT = 16 << 20  # bytes by which a process may grow over the second half of its storms


# ---- requests -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The outcome of one request.

    status: the HTTP status, 0 if the connection broke.
    seconds: the time until the end, however it came.
    """

    status: int = 0
    error: str = ""
    cut: bool = False
    seconds: float = 0.0
    stream: Stream = field(default_factory=Stream)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.stream.ended and self.stream.failure is None


def body(tokens: int, **others: Any) -> dict[str, Any]:
    """Return the body of a streamed completion of exactly so many tokens, which the server counts."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return {
        "prompt": "def fibonacci(n):",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": usage,
        **others,
    }


async def ask(
    client: Client, content: dict[str, Any], *, cut: Cut | None = None, begun: asyncio.Event | None = None
) -> Outcome:
    """Send one request and return its outcome. It waits no longer than PATIENCE.

    begun: set once the first piece of the stream has arrived, or the request has ended. A request that an engine had
        not begun is sent to the next engine when the first one dies, and ends well.
    """
    outcome, began = Outcome(), time.monotonic()
    route = "/v1/chat/completions" if "messages" in content else "/v1/completions"
    left = asyncio.Event()

    def arrived(data: bytes, at: float) -> None:
        outcome.stream.feed(data, at)
        if begun is not None and outcome.stream.moments:
            begun.set()
        if cut is not None and len(outcome.stream.moments) >= cut.pieces:
            left.set()

    sending = asyncio.ensure_future(client.send(client.encode(route, json.dumps(content).encode()), arrived))
    leaving = asyncio.ensure_future(left.wait())
    try:
        await asyncio.wait(
            {sending, leaving}, timeout=PATIENCE if cut is None else cut.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if sending.done():
            answer = sending.result()
            outcome.status, outcome.error = answer.status, answer.body.decode(errors="replace")
        elif cut is None:
            outcome.error = "hung"
        else:
            outcome.cut = True
    except (OSError, Disconnected) as error:
        outcome.error = str(error) or repr(error)
    finally:
        if begun is not None:
            begun.set()
        leaving.cancel()
        sending.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
    outcome.seconds = time.monotonic() - began
    return outcome


async def begin(client: Client, contents: Iterable[dict[str, Any]]) -> list[asyncio.Future[Outcome]]:
    """Send requests, and return their outcomes to come once each has begun: what a slow client would look for in the
    server's metrics may be over when it looks."""
    sent = [(content, asyncio.Event()) for content in contents]
    running = [asyncio.ensure_future(ask(client, content, begun=begun)) for content, begun in sent]
    await asyncio.gather(*(begun.wait() for _, begun in sent))
    return running


@dataclass(frozen=True)
class Cut:
    """The moment when a client leaves: after so many pieces or seconds, whichever comes first."""

    pieces: int
    seconds: float


def load(url: str) -> Client:
    return Client(Address.of(url), {})


# ---- scenarios ----------------------------------------------------------------------------------------------------


async def streams(server: Served, *, count: int = 300, tokens: int = 64) -> dict[str, float]:
    """Run all streams at once. Each must be complete, token for token."""
    client, began = load(server.url), time.monotonic()
    outcomes = await asyncio.gather(*(ask(client, body(tokens)) for _ in range(count)))
    seconds = time.monotonic() - began
    client.close()
    for outcome in outcomes:
        promise(outcome.complete, f"a stream was not complete: {outcome.status} {outcome.error}")
        got = outcome.stream.output_tokens
        promise(got == tokens, f"a stream of {tokens} tokens had {got}")
    return {"throughput": count * tokens / seconds, "slowest": max(outcome.seconds for outcome in outcomes)}


def any_request(draw: random.Random) -> dict[str, Any]:
    """Return a request of one of the kinds that take a path of their own through the server."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"stream": False, "stream_options": None},
        {"n": 3},
        {"logprobs": 3},
        {"prompt": ["class A:", "import "]},
        {"prompt": [[5, 6, 7], [8, 9]]},
        {"stop": ["\n"], "ignore_eos": False},
        {"echo": True},
        {"structured_outputs": {"json": schema}, "ignore_eos": False},
        {"prompt": "x = [" + "1, " * draw.randrange(200)},
        {"cache_salt": str(draw.random())},
    )
    return {**body(draw.randrange(1, 24)), **draw.choice(kinds)}


async def storm(server: Served, *, requests: int = 1000, seed: int = 0) -> int:
    """Send many requests at once and cut every second one. Returns how many were cut before they ended by
    themselves."""
    draw = random.Random(seed)
    client = load(server.url)
    cuts = [Cut(draw.randrange(12), draw.uniform(0.0, 5.0)) if i % 2 else None for i in range(requests)]
    outcomes = await asyncio.gather(*(ask(client, any_request(draw), cut=cut) for cut in cuts))
    client.close()
    for outcome, cut in zip(outcomes, cuts, strict=True):
        ended = outcome.cut or (outcome.status == 200 and outcome.stream.failure is None)
        promise(ended, f"a request {'that was to be cut' if cut else 'nobody cut'} failed: {outcome.error}")
    promise(server.wait_idle(), f"after a storm the server still has work: {server.busy():g}")
    return sum(outcome.cut for outcome in outcomes)


async def storms(server: Served, *, rounds: int = 20, requests: int = 1000) -> dict[str, float]:
    """Run several storms. The first half warms the memory up; over the second half nothing may grow."""
    processes = [server.engine, *server.api_servers]
    sizes: list[list[int]] = []
    opened: list[list[int]] = []
    cut = 0
    for round_ in range(rounds):
        cut += await storm(server, requests=requests, seed=round_)
        await asyncio.sleep(0.5)  # sockets that clients have left are closed
        sizes.append([resident(pid) for pid in processes])
        opened.append([descriptors(pid) for pid in processes])
        print(f"  storm {round_ + 1}: MiB {[s >> 20 for s in sizes[-1]]}, descriptors {opened[-1]}", flush=True)
    half = rounds // 2
    grown = [max(column[half:]) - column[half] for column in zip(*sizes, strict=True)]
    more = [max(column[half:]) - max(column[:half]) for column in zip(*opened, strict=True)]
    promise(max(grown) < FLAT, f"engine and API servers grew by {grown} bytes over the last {rounds - half} storms")
    promise(max(more) <= 2, f"engine and API servers hold {more} more descriptors than in the first storms")
    return {"cut": cut, "growth": max(grown) / 2**20}


async def kill(
    server: Served, victim: str, *, count: int = 64, tokens: int = 1200, after: float = 1.5, slack: float = 1.0
) -> dict[str, float]:
    """Kill (-9) the "engine" or the "API server" while streams run.

    slack: a factor on the promised times, for a machine that does other things too.
    """
    await server.until_ready()
    client = load(server.url)
    asked = time.monotonic()
    running = await begin(client, [body(tokens)] * count)
    await asyncio.sleep(after)
    api_servers = server.api_servers
    os.kill(server.engine if victim == "engine" else api_servers[0], signal.SIGKILL)
    began = time.monotonic()
    first = asyncio.ensure_future(_until_answered(client, victim, slack))
    outcomes = await asyncio.gather(*running)
    lost = [outcome for outcome in outcomes if not outcome.complete]
    ended = max((outcome.seconds for outcome in lost), default=0.0) - (began - asked)
    if victim == "engine":
        begun = [outcome for outcome in outcomes if outcome.stream.moments and outcome.stream.moments[0] < began]
        promise(not any(outcome.complete for outcome in begun), "streams outlived their engine")
        promise(all(outcome.stream.moments for outcome in lost), "requests without a token were lost with their engine")
    else:
        promise(len(lost) == count or len(api_servers) > 1, f"streams outlived their {victim}")
    promise(ended < 5 * slack, f"streams hung for {ended:.1f} s after the {victim} was gone")
    back = await first
    client.close()
    return {"streams_ended": max(0.0, ended), "recovery": back - began}


async def _until_answered(client: Client, victim: str, slack: float) -> float:
    """Return the moment when a request is answered again. Until then requests must be refused, and soon."""
    patience = 2 if victim == "engine" else 10  # seconds; without an API server a connection waits for the next one
    began = time.monotonic()
    while (outcome := await ask(client, body(4))).status != 200:
        promise(outcome.status in (0, 503), f"{outcome.status} while the {victim} was gone: {outcome.error}")
        promise(outcome.seconds < patience * slack, f"a request took {outcome.seconds:.1f} s to be refused")
        promise(time.monotonic() - began < 30 * slack, f"no {victim} came back")
        await asyncio.sleep(0.02)
    return time.monotonic()


async def drain(server: Served, *, count: int = 64, tokens: int = 200, after: float = 1.5) -> dict[str, float]:
    """Send SIGTERM while streams run."""
    client, other = load(server.url), load(server.url)
    running = await begin(client, [body(tokens)] * count)
    await asyncio.sleep(after)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while (refused := await ask(other, body(4))).status == 200:  # until the signal has arrived
        pass
    outcomes = await asyncio.gather(*running)
    code = await asyncio.to_thread(server.process.wait, PATIENCE)
    promise(refused.status == 503, f"a new request got {refused.status} while the server ended: {refused.error}")
    for outcome in outcomes:
        promise(outcome.complete, f"a running stream was lost: {outcome.status} {outcome.error}")
        promise(outcome.stream.output_tokens == tokens, f"a stream ended with {outcome.stream.output_tokens} tokens")
    promise(code == 0, f"the exit code is {code}")
    client.close()
    other.close()
    return {"seconds": time.monotonic() - began}


# ---- cost ---------------------------------------------------------------------------------------------------------

WORK = {"requests": 64, "input_len": 64, "output_len": 128}

OFFLINE = """
import json, sys, time
from ridgeline import LLM, SamplingParams
prompts, tokens, runs = json.loads(sys.stdin.readline()), int(sys.argv[1]), int(sys.argv[2])
llm = LLM(max_num_seqs=len(prompts), enable_prefix_caching=False)
engine, last, gaps, step = llm.assembly.engine, {}, [], llm.assembly.engine.step
def timed():
    events, now = step(), time.monotonic()
    for name in (*events.ids, *(event.request_id for event in events.events)):
        if name in last:
            gaps.append(now - last[name])
        last[name] = now
    return events
engine.step = timed
params = SamplingParams(max_tokens=tokens, ignore_eos=True)
for _ in range(runs + 1):
    print("ready", flush=True)
    sys.stdin.readline()
    gaps.clear(); last.clear()
    began = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.monotonic() - began
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    print(json.dumps({"seconds": seconds, "gaps": gaps}), flush=True)
"""


async def throughput(*, runs: int = 5) -> dict[str, list[float]]:
    """Return tokens/s, and 99th percentiles of the time between tokens, of both sides, in turn. The first run of each
    warms up."""
    draw = random.Random(0)
    prompts = [[draw.randrange(100, 4000) for _ in range(WORK["input_len"])] for _ in range(WORK["requests"])]
    total = WORK["requests"] * WORK["output_len"]
    found: dict[str, list[float]] = {"http": [], "offline": [], "http_itl": [], "offline_itl": []}
    command = [sys.executable, "-c", OFFLINE, str(WORK["output_len"]), str(runs)]
    offline = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert offline.stdin is not None
    assert offline.stdout is not None
    print(json.dumps(prompts), file=offline.stdin)
    with Served("--max-num-seqs", str(WORK["requests"]), "--no-enable-prefix-caching") as server:
        client = load(server.url)
        for run in range(runs + 1):
            assert offline.stdout.readline() == "ready\n"
            print(file=offline.stdin)
            alone = json.loads(offline.stdout.readline())
            began = time.monotonic()
            contents = [body(WORK["output_len"], prompt=prompt) for prompt in prompts]
            outcomes = await asyncio.gather(*(ask(client, content) for content in contents))
            seconds = time.monotonic() - began
            promise(
                all(o.complete and o.stream.output_tokens == WORK["output_len"] for o in outcomes), "a stream broke"
            )
            if run:
                found["http"].append(total / seconds)
                found["offline"].append(total / alone["seconds"])
                found["http_itl"].append(percentile(list(_gaps(outcomes)), 99) * 1e3)
                found["offline_itl"].append(percentile(alone["gaps"], 99) * 1e3)
                print("  " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in found.items()), flush=True)
        client.close()
    offline.stdin.close()
    offline.wait()
    return found


def _gaps(outcomes: Iterable[Outcome]) -> Iterable[float]:
    """Return the times between tokens, counted as in vLLM's benchmark: of tokens that come together, all but the first
    have a gap of 0."""
    for outcome in outcomes:
        stream = outcome.stream
        for i in range(1, len(stream.moments)):
            yield stream.moments[i] - stream.moments[i - 1]
            yield from [0.0] * (stream.counts[i] - 1)


# ---- the command --------------------------------------------------------------------------------------------------


def _record(workload: str, metric: str, samples: Sequence[float], unit: str, better: str) -> Record:
    return Record(
        engine="ridgeline", version=__version__, workload=f"serve:{workload}", metric=metric,
        value=statistics.median(samples), samples=tuple(samples), unit=unit, better=better, model="embedded",
        dtype="float32", machine=host(),
        options={"cores": os.cpu_count(), **(WORK if workload == "throughput" else {})},
    )  # fmt: skip


async def _run(scenario: str) -> list[Record]:
    match scenario:
        case "streams":
            with Served() as server:
                found = await streams(server)
                promise(server.wait_idle(), "requests are left")
            return [
                _record("streams-300", "throughput", [found["throughput"]], "tokens/s", "higher"),
                _record("streams-300", "slowest stream", [found["slowest"]], "s", "lower"),
            ]
        case "storm":
            # On a CPU torch keeps some memory for every size of step that it ever ran. There are few sizes, so this
            # growth ends, and memory that requests leave behind would show.
            with Served() as server:
                found = await storms(server)
            return [_record("abort-storm", "growth over ten storms", [found["growth"]], "MiB", "lower")]
        case "kill":
            with Served() as server:
                engine = [await kill(server, "engine") for _ in range(3)]
            with Served() as server:
                api = [await kill(server, "API server") for _ in range(3)]
            return [
                _record(f"kill-{name}", metric, [found[metric] for found in runs], "s", "lower")
                for name, runs in (("engine", engine), ("face", api))
                for metric in ("streams_ended", "recovery")
            ]
        case "drain":
            with Served() as server:
                found = await drain(server)
            return [_record("drain", "seconds", [found["seconds"]], "s", "lower")]
        case _:
            sides = await throughput()
            records = [
                _record("throughput", name, sides[name], "tokens/s", "higher") for name in ("http", "offline")
            ] + [
                _record("throughput", f"{name} ITL p99", sides[f"{name}_itl"], "ms", "lower")
                for name in ("http", "offline")
            ]
            share = records[0].value / records[1].value
            added = records[2].value - records[3].value
            print(f"  {share:.1%} of the offline throughput, {added:+.1f} ms between tokens at the 99th percentile")
            return records


def main() -> None:
    known = ("streams", "storm", "kill", "drain", "throughput")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*known, []], metavar="SCENARIO")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    allow_descriptors()
    broken = 0
    for scenario in arguments.scenarios or known:
        print(f"{scenario}:", flush=True)
        try:
            records = uvloop.run(_run(scenario))
        except Broken as reason:
            print(f"  BROKEN: {reason}")
            broken += 1
            continue
        append(arguments.out, records)
        for record in records:
            print(f"  {record.metric}: {record.value:.4g} {record.unit}")
    sys.exit(int(broken > 0))


if __name__ == "__main__":
    main()
