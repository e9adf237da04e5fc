"""The processor time of an API server for each token of a chat's stream, without a network, an engine or a detokenizer.

    python -m benchmarks.chat_stream [--against TREE] [--rounds 7] [--write FILE.jsonl]

Pieces of one token each go through the route's own answer (`Chat.stream`). Two things are timed: chunks that are
encoded by msgspec and nothing else, and events as they go to a connection whose writes do nothing. A reader of Hermes'
calls and of reasoning in tags is timed beside the plain one. A figure is the best of several streams in a process.

With `--against`, a checkout of another commit takes turns with this one, since other work on a machine comes and goes.
Each round is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec

from ridgeline.bench.results import Machine, Record, append, host
from ridgeline.core.plan.request import SamplingParams
from ridgeline.serving.generation.service import GenerationRequest, Piece
from ridgeline.serving.http.chat import Chat
from ridgeline.serving.http.sse import EventStream
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.text.outputs import CompletionOutput
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.version import __version__

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WORDS = (" the", " ridge", " line", " is", " long", ",", " and", " steep", ".")


class StandIn:
    """A run of one choice whose pieces are all there from the beginning."""

    def __init__(self, asked: GenerationRequest, tokens: int) -> None:
        self.asked, self.tokens = asked, tokens
        self.drawn_tokens = self.reasoning_tokens = self.cached_tokens = 0

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Piece]:
        output = CompletionOutput(0)
        for number in range(self.tokens):
            self.drawn_tokens += 1
            if number == self.tokens - 1:
                output.finish_reason = "stop"
            word = WORDS[number % len(WORDS)]
            yield Piece(word, [number], output, (len(word),))


def chat(forms: Forms, tokens: int, fields: dict[str, Any]) -> Chat:
    """Return the answer to one chat."""
    asked = GenerationRequest(id="req-1", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=tokens))
    api: Any = SimpleNamespace(
        service=SimpleNamespace(run=lambda asked: StandIn(asked, tokens)),
        names=("model",),
        forms=forms,
        tokenizer=SimpleNamespace(added={}),
        config=SimpleNamespace(request_breakdown=False),
    )
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hello"}], "stream": True, **fields})
    return Chat(api, body, asked)


def encoded(answer: Chat) -> None:
    encode = msgspec.json.encode

    async def write(value: Any) -> None:
        encode(value)

    asyncio.run(answer.stream(write))


def sent(answer: Chat) -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        pass

    asyncio.run(EventStream(answer.stream)({"type": "http", "headers": []}, receive, send))


def microseconds(make: Callable[[], Chat], stream: Callable[[Chat], None], tokens: int, times: int) -> list[float]:
    """Return the processor time of a token in each of several streams, in microseconds."""
    found = []
    for _ in range(times):
        answer = make()
        gc.collect()
        began = time.process_time()
        stream(answer)
        found.append(1e6 * (time.process_time() - began) / tokens)
    return found


def once(tokens: int, times: int) -> dict[str, float]:
    """Return the best of several streams of each kind."""
    read = choose("hermes", "qwen3", (), ())
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    kinds: dict[str, tuple[Forms, dict[str, Any], Callable[[Chat], None]]] = {
        "encoded": (Forms(), {}, encoded),
        "sent": (Forms(), {}, sent),
        "sent with usage": (Forms(), usage, sent),
        "sent and read for calls": (read, {"tools": [TOOL]}, sent),
    }
    return {
        name: min(microseconds(partial(chat, forms, tokens, fields), stream, tokens, times))
        for name, (forms, fields, stream) in kinds.items()
    }


def process(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a process with the code of a tree finds: figures, and the machine with the tree's commit."""
    command = [sys.executable, "-P", __file__, "--once", f"--tokens={options.tokens}", f"--best-of={options.best_of}"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--best-of", type=int, default=15)
    parser.add_argument("--write", type=Path, help="a file of results that gets one line for each figure")
    parser.add_argument("--once", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps({"found": once(options.tokens, options.best_of), "machine": asdict(host())}))
        return
    here = Path(__file__).parents[1]
    trees = [here] if options.against is None else [options.against.resolve(), here]
    rounds: dict[Path, list[dict[str, Any]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            rounds[tree].append(process(tree, options))
    records = []
    for found in rounds.values():
        machine = Machine(**found[0]["machine"])
        for kind in found[0]["found"]:
            samples = tuple(each["found"][kind] for each in found)
            records.append(
                Record(
                    engine="ridgeline",
                    version=__version__,
                    workload=f"chat stream, {kind}",
                    metric="processor time per token",
                    value=median(samples),
                    unit="us",
                    samples=samples,
                    machine=machine,
                    options={"tokens": options.tokens, "best_of": options.best_of},
                )
            )
            spread = f"{min(samples):.3f} to {max(samples):.3f}"
            print(f"{machine.commit} {kind}: {median(samples):.3f} µs a token ({spread})", flush=True)
    if options.write is not None:
        append(options.write, records)


if __name__ == "__main__":
    main()
