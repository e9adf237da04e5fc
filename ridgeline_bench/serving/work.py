"""The requests to a server and their times: arrivals, lengths and prompts, with every draw from the seed.

Arrivals and lengths depend on the seed and the request's number alone, so each rate sees the same pattern, squeezed or
stretched. Prompts differ from rate to rate, because otherwise a prefix cache would remember those of the rate before.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.errors import InvalidConfig

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or a chat's messages

# The words of chat prompts. Most vocabularies hold them whole, so that a word is about a token.
WORDS = re.findall(
    r"\w+",
    "the of and to in is was for that on with as by at from it an be this are or his which not have had "
    "were but one all has their more been other who also first its new after they two time when can "
    "would only some them into year over such than most between during these may then about no each both "
    "through used there where many part while long water world light house power three paper point small "
    "found large group order under state",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request. `at` is in seconds after the start. `max_tokens` is that of the answer. `prompt_tokens` is 0 if the
    server has to tell."""

    index: int
    at: float
    prompt: Prompt
    max_tokens: int
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths: all `low`; uniform from `low` to `high`; or lognormal with mean and deviation."""

    low: int
    high: int
    mean: float = 0.0
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Return the lengths of "512", "100:1000" (uniform), or "400,300" and "400,300,2000" (lognormal: mean,
        deviation, longest)."""
        try:
            if "," in text:
                mean, deviation, *longest = map(float, text.split(","))
                found = cls(1, int(longest[0]) if longest else 1 << 30, mean, deviation)
                good = 1 <= mean <= 1 << 30 and 0 < deviation <= 1 << 30 and len(longest) <= 1
            else:
                low, _, high = text.partition(":")
                found = cls(int(low), int(high or low))
                good = True
        except (ValueError, OverflowError):
            good = False
        if not good or not 1 <= found.low <= found.high:
            raise InvalidConfig(f"{option} must be a length, LOW:HIGH, or MEAN,DEVIATION[,LONGEST], got {text!r}.")
        return found

    def draw(self, rng: random.Random) -> int:
        if not self.mean:
            return rng.randint(self.low, self.high)
        # mean and deviation are those of the lengths, and the underlying normal has these:
        variance = math.log1p((self.deviation / self.mean) ** 2)
        length = rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return max(1, min(self.high, round(length)))


def prefix(text: str) -> tuple[int, int]:
    """Return the tokens and groups of --shared-prefix, "1024" or "1024,8". Each group has tokens of its own."""
    tokens, _, groups = text.partition(",")
    if not text:
        return 0, 1
    if not (tokens.isdigit() and (groups or "1").isdigit() and int(tokens) and int(groups or 1)):
        raise InvalidConfig(f"--shared-prefix must be TOKENS or TOKENS,GROUPS, got {text!r}.")
    return int(tokens), int(groups or 1)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work for a server.

    `count` or `duration` (seconds) says how much; the shorter counts if both are given. `burstiness` is the shape of
    the gamma distribution of gaps (1: Poisson; below: burstier; inf: evenly spaced). Each request begins with the
    `prefix_tokens` of one of `prefix_groups` groups. `trace` holds rows of a trace file, which replace draws.
    Prompts are token ids, messages of a `chat`, or each a `text`.
    """

    seed: int = 0
    count: int = 0
    duration: float = 0.0
    burstiness: float = 1.0
    input_len: Lengths = Lengths(512, 512)
    output_len: Lengths = Lengths(128, 128)
    prefix_tokens: int = 0
    prefix_groups: int = 1
    vocab_size: int = 0
    chat: bool = False
    text: bool = False
    trace: tuple[dict[str, Any], ...] = field(default=())

    def arrivals(self, rate: float) -> list[float]:
        """Return the seconds after the start, at `rate` requests a second (inf: all at once; 0: as the trace says)."""
        if rate == 0:
            start = min(row["timestamp"] for row in self.trace)
            times = [row["timestamp"] - start for row in self.trace]
            times = [at for at in times if not self.duration or at < self.duration]
            return times[: self.count or None]
        most = min(self.count or math.inf, len(self.trace) or math.inf)
        if math.isinf(rate):
            return [0.0] * int(most)
        rng, at, found = random.Random(f"{self.seed}/arrivals"), 0.0, list[float]()
        while len(found) < most:
            at += self._gap(rng) / rate
            if self.duration and at >= self.duration:
                break
            found.append(at)
        return found

    def _gap(self, rng: random.Random) -> float:
        """Return a gap between arrivals whose mean is 1."""
        return 1.0 if math.isinf(self.burstiness) else rng.gammavariate(self.burstiness, 1 / self.burstiness)

    def requests(self, rate: float, point: str, share: tuple[int, int] = (0, 1)) -> list[Request]:
        """Return the requests of one rate, or every n-th of them from the k-th on, `share` being (k, n).

        `point` is the rate's name. Prompts of different points differ.
        """
        first, step = share
        return [
            self._request(index, at, point) for index, at in enumerate(self.arrivals(rate)) if index % step == first
        ]

    def sizes(self, index: int) -> tuple[int, int, int]:
        """Return one request's tokens of its own prompt and of its answer, and its group of those that share a
        beginning."""
        if self._fixed:
            return self.input_len.low, self.output_len.low, 0
        row, rng = self.trace[index] if self.trace else {}, random.Random(f"{self.seed}/{index}/lengths")
        drawn = self.input_len.draw(rng), self.output_len.draw(rng), rng.randrange(self.prefix_groups)
        return row.get("input_length", drawn[0]), row.get("output_length", drawn[1]), drawn[2]

    @property
    def _fixed(self) -> bool:
        """Return True if nothing is drawn for a request."""
        drawn = self.trace or self.prefix_groups > 1
        return not drawn and all(each.low == each.high and not each.mean for each in (self.input_len, self.output_len))

    def longest(self) -> int:
        """Return the tokens of the longest request's prompt and answer. Text counts as none, since only the server
        knows its tokens."""
        found = []
        for index in range(len(self.trace) or len(self.arrivals(1.0))):
            input_len, max_tokens, _ = self.sizes(index)
            prompt = self.trace[index].get("prompt") if self.trace else None
            if prompt is not None:
                input_len = len(prompt) if isinstance(prompt, list) and not self.chat else 0
            found.append(self.prefix_tokens * (prompt is None) + input_len + max_tokens)
        return max(found, default=0)

    def _request(self, index: int, at: float, point: str) -> Request:
        input_len, max_tokens, group = self.sizes(index)
        if self.trace and "prompt" in self.trace[index]:
            prompt: Prompt = self.trace[index]["prompt"]
            if self.chat and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            known = len(prompt) if not self.chat and isinstance(prompt, list) else 0
            return Request(index=index, at=at, prompt=prompt, max_tokens=max_tokens, prompt_tokens=known)
        own, before = (
            self._draw(f"{point}/{index}", input_len),
            self._draw(f"{point}/group {group}", self.prefix_tokens),
        )
        if self.text:
            return Request(index=index, at=at, prompt=" ".join([*before, *own]), max_tokens=max_tokens)
        if self.chat:
            system = [{"role": "system", "content": " ".join(before)}] if before else []
            messages = [*system, {"role": "user", "content": " ".join(own)}]
            return Request(index=index, at=at, prompt=messages, max_tokens=max_tokens)
        tokens = [*before, *own]
        return Request(index=index, at=at, prompt=tokens, max_tokens=max_tokens, prompt_tokens=len(tokens))

    def _draw(self, what: str, count: int) -> list[Any]:
        """Return words for a chat or a text, else token ids."""
        rng = random.Random(f"{self.seed}/{what}")
        return rng.choices(WORDS if self.chat or self.text else range(self.vocab_size), k=count)
