"""W6 against a server: the sessions of `sessions.Agents`. A turn is sent when the one before has its answer and its
tool is done.

Prompts are token ids that follow from the seed and a content's number, so every server gets the same bytes. The
answers in later prompts are drawn too: those of two engines would differ. So no answer is found in a cache, and the
ideal hit rate leaves them out.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.traffic import Ask, Piece
from ridgeline_bench.serving.child import SendMoments, exchange, outcome_of
from ridgeline_bench.serving.client import Address, Client
from ridgeline_bench.serving.figures import Spread
from ridgeline_bench.serving.outcome import Outcome
from ridgeline_bench.serving.server import Server
from ridgeline_bench.serving.session import STREAMING
from ridgeline_bench.serving.sessions import MOST_TURNS, Agents
from ridgeline_bench.serving.work import Request


class AgentContents:
    """Token ids of contents, below `vocab_size`. Each content is drawn once."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed, self._vocab_size = seed, vocab_size
        self._known: dict[Piece, array[int]] = {}

    def tokens(self, prompt: Sequence[Piece]) -> list[int]:
        """Return the ids of a prompt."""
        found = array("i")
        for piece in prompt:
            if piece not in self._known:
                draw = random.Random(f"{self._seed}/content {piece.content}")
                self._known[piece] = array("i", draw.choices(range(self._vocab_size), k=piece.tokens))
            found += self._known[piece]
        return found.tolist()


class AgentTurn(NamedTuple):
    """A request of a session, and its outcome."""

    ask: Ask
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class AgentAsking:
    """The way to send turns. fields: go into every request's body. timeout: seconds that one may take. api_key: "" for
    none."""

    fields: Mapping[str, Any]
    timeout: float
    api_key: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentFigures:
    """The figures of W6. Times are in ms, rates per second of `duration`, which ends with the last answer.

    sessions: those that came, and completed those of which every turn was answered. errors: failed requests by kind.
    session_time: from a session's first request to its last answer, tools and its sub-agent included. ttft: of all
    turns. ttft_by_turn: their medians. hit_rate: share of prompt tokens that the server found in its cache, and
    ideal_hit_rate of those that it had got before. cost_per_session: None without a price.
    """

    sessions: int
    completed: int
    requests: int
    errors: Mapping[str, int]
    duration: float
    session_time: Spread
    ttft: Spread
    ttft_by_turn: Mapping[int, float]
    hit_rate: float
    ideal_hit_rate: float
    output_rate: float
    total_rate: float
    cost_per_session: float | None


def seen_tokens(ask: Ask) -> int:
    """Return the tokens of a prompt's beginning that the server had got before: without the answer, which it wrote
    otherwise."""
    return ask.seen - (ask.prompt[-2].tokens if len(ask.prompt) > 2 else 0)


async def play(agents: Agents, server: Server, asking: AgentAsking) -> list[AgentTurn]:
    """Send all turns of all sessions, and return them in the order of their ends. A session whose request fails goes no
    further. Raise InvalidConfig for sessions that the server could not run."""
    check(agents, server)
    headers = {"Authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}
    client, contents = Client(Address.of(server.url), headers), AgentContents(agents.seed, server.vocab_size)
    turns, start = list[AgentTurn](), time.monotonic()
    body = {"model": server.model, **STREAMING, **asking.fields}

    async def one(ask: Ask, running: asyncio.TaskGroup) -> None:
        prompt = contents.tokens(ask.prompt)
        sent = {"prompt": prompt, "max_tokens": ask.answer.tokens, **body}
        kept = {name: value for name, value in sent.items() if value is not None}
        encoded = client.encode("/v1/completions", msgspec.json.encode(kept))
        if (wait := start + ask.at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        moment = time.monotonic()
        done = await exchange(client, encoded, (moment + asking.timeout, math.inf))
        request = Request(
            index=ask.number, at=ask.at, prompt=prompt, max_tokens=ask.answer.tokens, prompt_tokens=len(prompt)
        )
        outcome = outcome_of(request, done, SendMoments(start, start + ask.at, moment, body))
        turns.append(AgentTurn(ask, outcome))
        if not outcome.error:
            for later in agents.after(ask, outcome.end):
                running.create_task(one(later, running))

    async with asyncio.TaskGroup() as running:
        for ask in agents.begin():
            running.create_task(one(ask, running))
    client.close()
    return turns


def check(agents: Agents, server: Server) -> None:
    """Raise InvalidConfig for sessions that the server could not run."""
    if not server.vocab_size:
        raise InvalidConfig(f"{server.url} does not say how large its vocabulary is; give --vocab-size.")
    if server.max_model_len and agents.longest > server.max_model_len:
        raise InvalidConfig(
            f"the last turn of a session may need {agents.longest} tokens and the model's context has "
            f"{server.max_model_len}; lower --turns or --agent-sizes."
        )


def figures(agents: Agents, turns: Sequence[AgentTurn], price: float | None = None) -> AgentFigures:
    """Return the figures of the turns that `play` has sent. price: of the server for an hour."""
    good = [turn for turn in turns if not turn.outcome.error]
    duration = max((turn.outcome.end for turn in turns), default=0.0)
    begun, ended, failed = dict[int, float](), dict[int, float](), set[int]()
    by_turn: dict[int, list[float]] = {}
    for ask, outcome in turns:
        session = ask.session % agents.sessions
        begun[session] = min(begun.get(session, math.inf), outcome.sent)
        ended[session] = max(ended.get(session, 0.0), outcome.end)
        if outcome.error:
            failed.add(session)
        else:
            by_turn.setdefault(ask.number % MOST_TURNS, []).append(outcome.ttft)
    whole = [session for session in sorted(begun) if session not in failed]
    prompt, output = (sum(getattr(turn.outcome, name) for turn in good) for name in ("prompt_tokens", "output_tokens"))
    per_second = 1 / duration if duration else 0.0
    return AgentFigures(
        sessions=agents.sessions,
        completed=len(whole),
        requests=len(turns),
        errors=Counter(turn.outcome.error for turn in turns if turn.outcome.error),
        duration=duration,
        session_time=Spread.of([ended[session] - begun[session] for session in whole]),
        ttft=Spread.of([turn.outcome.ttft for turn in good]),
        ttft_by_turn={turn: Spread.of(times).p50 for turn, times in sorted(by_turn.items())},
        hit_rate=sum(turn.outcome.cached_tokens for turn in good) / max(1, prompt),
        ideal_hit_rate=sum(seen_tokens(turn.ask) for turn in good) / max(1, prompt),
        output_rate=output * per_second,
        total_rate=(prompt + output) * per_second,
        cost_per_session=price * duration / 3600 / len(whole) if price is not None and whole else None,
    )
