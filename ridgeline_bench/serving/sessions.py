"""W6: agents. Sessions of many turns whose prompts grow, with tools between the turns and sub-agents that branch off.

Published of such traffic (vLLM's AgentX): 43 turns a session in the median, 142 K tokens of prompt at its end, 444
tokens of an answer, more than 96 % of prompt tokens in the cache, sub-agents in 44 % of the sessions. Here all
instructions are one content; a session adds its task, and every turn what a tool has returned and what was answered.
A tool takes seconds, and one in ten minutes, after which the session returns to whatever the cache still has of it.

Every draw comes from the seed and the session's number, so a session is the same whatever runs beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.traffic import Ask, Piece

MOST_SESSIONS, MOST_TURNS = 1 << 17, 1 << 11
MOST_TOKENS = 1 << 20  # of each size
INSTRUCTIONS = 0  # the content that all sessions begin with


@dataclass(frozen=True, kw_only=True)
class Agents:
    """The sizes of W6, in tokens and seconds.

    rate: sessions that begin a second (inf: all at once). time_scale: a factor on the time that tools take.
    instructions, task, result, answer: tokens of the shared beginning, of a session's own, of a tool's result and of an
    answer; results and answers vary around these. pause, absence: median seconds of a tool, and of one in ten.
    branches: share of sessions with a sub-agent, which begins with its parent's prompt and has branch_turns turns.
    """

    sessions: int = 100
    turns: int = 43
    rate: float = 1.0
    time_scale: float = 1.0
    seed: int = 0
    instructions: int = 12_000
    task: int = 2_000
    result: int = 2_590
    answer: int = 444
    pause: float = 4.0
    absence: float = 120.0
    branches: float = 0.44
    branch_turns: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.sessions <= MOST_SESSIONS or not 1 <= self.turns <= MOST_TURNS:
            raise InvalidConfig(
                f"there can be 1 to {MOST_SESSIONS} sessions of 1 to {MOST_TURNS} turns, got {self.sessions} of "
                f"{self.turns}."
            )
        if not self.rate > 0 or not 0 <= self.time_scale < float("inf"):
            raise InvalidConfig(
                f"sessions need a rate above 0 and a time scale from 0, got {self.rate!r} and {self.time_scale!r}."
            )

    @classmethod
    def sizes(cls, text: str) -> dict[str, int]:
        """Return the tokens of "INSTRUCTIONS,TASK,RESULT,ANSWER"; none for an empty text. Raise InvalidConfig."""
        names = ("instructions", "task", "result", "answer")
        found = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")] if text else []
        if text and (len(found) != len(names) or not 0 < min(found) <= max(found) <= MOST_TOKENS):
            raise InvalidConfig(
                f"--agent-sizes needs INSTRUCTIONS,TASK,RESULT,ANSWER in tokens from 1 to {MOST_TOKENS}, got {text!r}."
            )
        return dict(zip(names, found, strict=False))

    @property
    def longest(self) -> int:
        """The tokens of a last prompt and answer at most."""
        each = 2 * (self.result + self.answer)
        return self.instructions + 2 * self.task + (self.turns + self.branch_turns) * each

    def begin(self) -> Iterator[Ask]:
        """Yield the first turns of all sessions."""
        draw, at = random.Random(f"{self.seed}/sessions"), 0.0
        for session in range(self.sessions):
            shared = Piece(INSTRUCTIONS, self.instructions)
            task = Piece(self._content(session, 0), self._about(session, 0, self.task))
            yield self._ask(session, 0, at, (shared, task), self.instructions * (session > 0))
            at += draw.expovariate(self.rate) if self.rate < float("inf") else 0.0

    def after(self, ask: Ask, ended: float) -> Sequence[Ask]:
        """Return the session's next turn, and the first one of its sub-agent if that begins now."""
        session, turn = ask.session, ask.number % MOST_TURNS
        branch = session >= self.sessions
        last = self._branch_point(session - self.sessions) + self.branch_turns if branch else self.turns - 1
        found = [self._next(session, turn + 1, ask, ended)] if turn < last else []
        if not branch and turn == self._branch_point(session) and turn + 1 < MOST_TURNS:
            found.append(self._next(session + self.sessions, turn + 1, ask, ended))
        return found

    def _next(self, session: int, turn: int, ask: Ask, ended: float) -> Ask:
        draw = random.Random(f"{self.seed}/{session}/{turn}/pause")
        median = self.absence if draw.random() < 0.1 else self.pause
        pause = self.time_scale * draw.lognormvariate(0.0, 0.7) * median
        before = (*ask.prompt, ask.answer)
        result = Piece(self._content(session, 2 * turn), self._about(session, 2 * turn, self.result))
        return self._ask(session, turn, ended + pause, (*before, result), ask.length + ask.answer.tokens)

    def _ask(self, session: int, turn: int, at: float, prompt: tuple[Piece, ...], seen: int) -> Ask:
        answer = Piece(self._content(session, 2 * turn + 1), self._about(session, 2 * turn + 1, self.answer))
        number = session * MOST_TURNS + turn
        return Ask(number=number, at=at, prompt=prompt, answer=answer, seen=seen, session=session)

    def _branch_point(self, session: int) -> int:
        """Return the turn after which a session's sub-agent begins; -1 if it has none."""
        draw = random.Random(f"{self.seed}/{session}/branch")
        has = draw.random() < self.branches
        return draw.randrange(self.turns) if has else -1

    def _about(self, session: int, place: int, mean: int) -> int:
        """Return a length from a half to one and a half times the mean."""
        return max(1, round(mean * random.Random(f"{self.seed}/{session}/{place}/length").uniform(0.5, 1.5)))

    def _content(self, session: int, place: int) -> int:
        return 1 + session * 2 * MOST_TURNS + place
