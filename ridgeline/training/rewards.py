"""Rewards of answers, by rules: their length, an expression that they match, a number, or code that returns what it
should. None of them evaluates an answer in this process.

A line of the prompts' file brings what its reward compares with:

    length       "target": tokens
    regex        "pattern": an expression
    arithmetic   "answer": a number, or a calculation
    code         "entry": a function's name, "tests": [[arguments, expected], …], maybe "prefix": text before the code
    solved       as `code`, but all or nothing
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.sandbox import CodeCall, SealedWorkers, refusal

MODEL = "model"  # the reward that a reward model gives
REGEX_SECONDS = 2.0
MOST_DIGITS = 400  # of numbers in calculations, numerator and denominator
MOST_DEPTH = 50  # brackets inside each other
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+")
_TOKEN = re.compile(r"\s*(\*\*|//|\d+\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+|[-+*/%()^])")


class DrawnAnswer(NamedTuple):
    """An answer, and the line of its prompt. tokens: how many it has. ended: it was not cut off."""

    text: str
    tokens: int
    ended: bool
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The rewards that are added up.

    names, weights: as many of both; no weights: all are 1.
    target, pattern: where a line brings none of its own.
    model: the folder of the reward model, for the reward "model".
    unsafe: code may run without isolation.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...] = ()
    target: int = 0
    pattern: str = ""
    model: str = ""
    unsafe: bool = False

    def __post_init__(self) -> None:
        if not self.names or (unknown := [name for name in self.names if name not in (*REWARDS, MODEL)]):
            given = unknown[0] if self.names else ""
            raise InvalidConfig(f"there is no reward {given!r}; known: {', '.join((*REWARDS, MODEL))}.")
        if bool(self.model) != (MODEL in self.names):
            raise InvalidConfig(
                "the reward model needs --reward-model, and that is for no other; give both, or neither."
            )
        if self.weights and len(self.weights) != len(self.names):
            raise InvalidConfig(f"{len(self.names)} rewards need as many weights, got {len(self.weights)}.")


class Rewards:
    """The weighted sum of some rewards, and the workers that run code. Raise InvalidConfig if code cannot be isolated
    here though it must be.

    judge: scores answers, for the reward "model"; set before the first answers.
    """

    judge: Callable[[Sequence[DrawnAnswer]], list[float]] | None = None

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._workers = SealedWorkers(available(), isolated=not config.unsafe)
        if {"code", "solved"} & set(config.names) and not config.unsafe and (why := refusal()) is not None:
            raise InvalidConfig(
                f"code cannot be isolated here: {why}. Run on another machine, or give --unsafe-local-rewards: the "
                "code that the model writes may then do all that you may."
            )
        self._weights = config.weights or (1.0,) * len(config.names)

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise InvalidConfig for a line that lacks what a reward compares with."""
        for name in self.config.names:
            if name != MODEL:
                CHECKS[name](record, self.config)

    def of(self, answers: Sequence[DrawnAnswer]) -> list[float]:
        """Return the reward of each answer. Raise NoSandbox if no code can be run any more."""
        parts = [self._of(name, answers) for name in self.config.names]
        return [sum(w * r for w, r in zip(self._weights, each, strict=True)) for each in zip(*parts, strict=True)]

    def _of(self, name: str, answers: Sequence[DrawnAnswer]) -> list[float]:
        if name != MODEL:
            return REWARDS[name](answers, self.config, self._workers)
        assert self.judge is not None
        return self.judge(answers)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def by_length(answers: Sequence[DrawnAnswer], config: RewardConfig, workers: SealedWorkers) -> list[float]:
    """Return 1 for answers of the target's tokens, and less the farther they are from it, down to 0."""
    targets = [int(each.record.get("target", config.target)) for each in answers]
    return [max(0.0, 1 - abs(each.tokens - target) / target) for each, target in zip(answers, targets, strict=True)]


# Answers a line for each text: whether the expression is found there. It begins with what is done, for the parent
_SEARCH = r"""
import json, re, sys

found = []
for pattern, text in json.load(sys.stdin):
    try:
        found.append(re.search(pattern, text) is not None)
    except re.error:
        found.append(False)
json.dump(found, sys.stdout)
"""


def by_regex(answers: Sequence[DrawnAnswer], config: RewardConfig, workers: SealedWorkers) -> list[float]:
    """Return 1 for answers in which the expression is found. A search that takes longer than `REGEX_SECONDS` finds
    nothing."""
    pairs = [(str(each.record.get("pattern", config.pattern)), each.text) for each in answers]
    found = _searched(pairs)
    if found is None:  # one of them is to blame
        found = [bool((_searched([pair]) or [False])[0]) for pair in pairs]
    return [float(each) for each in found]


def _searched(pairs: Sequence[tuple[str, str]]) -> list[bool] | None:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps(pairs), capture_output=True, text=True, timeout=REGEX_SECONDS, check=True, env={},
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    found: list[bool] = json.loads(ran.stdout)
    return found


def by_arithmetic(answers: Sequence[DrawnAnswer], config: RewardConfig, workers: SealedWorkers) -> list[float]:
    """Return 1 for answers whose last line, or whose last number, has the value of the line's answer."""
    return [float(_is_right(each)) for each in answers]


def _is_right(answer: DrawnAnswer) -> bool:
    wanted = calculated(str(answer.record["answer"]))
    lines = [line for line in answer.text.splitlines() if line.strip()]
    last = lines[-1].rpartition("=")[2] if lines else ""
    numbers = _NUMBER.findall(answer.text)
    signed = numbers[-1:] and re.search(r"-\s*" + re.escape(numbers[-1]) + r"\D*\Z", answer.text)
    ways = [last.strip(" .$`*\\"), ("-" if signed else "") + numbers[-1].replace(",", "") if numbers else ""]
    return wanted is not None and any(calculated(way) == wanted for way in ways)


def calculated(text: str) -> Fraction | None:
    """Return the value of a calculation with + - * / // % ** ( ), exactly, or None for what is none. It is parsed here
    and never evaluated by Python; numbers have at most `MOST_DIGITS` digits."""
    tokens, at = list[str](), 0
    text = text.strip()
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            return None
        tokens.append("**" if match[1] == "^" else match[1])
        at = match.end()
    try:
        value, rest = _sum(tokens, 0)
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    return None if rest else value


Parsed = tuple[Fraction, list[str]]


def _sum(tokens: list[str], depth: int) -> Parsed:
    value, tokens = _term(tokens, depth)
    while tokens and tokens[0] in "+-":
        other, rest = _term(tokens[1:], depth)
        value, tokens = _bounded(value + other if tokens[0] == "+" else value - other), rest
    return value, tokens


def _term(tokens: list[str], depth: int) -> Parsed:
    value, tokens = _signed(tokens, depth)
    while tokens and tokens[0] in ("*", "/", "//", "%"):
        other, rest = _signed(tokens[1:], depth)
        operations: dict[str, Callable[[Fraction, Fraction], Any]] = {
            "*": Fraction.__mul__, "/": Fraction.__truediv__, "//": Fraction.__floordiv__, "%": Fraction.__mod__,
        }  # fmt: skip
        value, tokens = _bounded(Fraction(operations[tokens[0]](value, other))), rest
    return value, tokens


def _signed(tokens: list[str], depth: int) -> Parsed:
    if depth > MOST_DEPTH:
        raise ValueError
    if tokens[0] in ("+", "-"):
        value, rest = _signed(tokens[1:], depth + 1)
        return (-value if tokens[0] == "-" else value), rest
    value, rest = _atom(tokens, depth)
    if rest[:1] == ["**"]:
        power, rest = _signed(rest[1:], depth + 1)
        size = max(len(str(abs(value.numerator))), len(str(value.denominator)))
        if power.denominator != 1 or abs(power) * size > MOST_DIGITS:
            raise ValueError
        value = _bounded(Fraction(value) ** int(power))
    return value, rest


def _atom(tokens: list[str], depth: int) -> Parsed:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:], depth + 1)
        if rest[:1] != [")"]:
            raise ValueError
        return value, rest[1:]
    return _bounded(Fraction(tokens[0])), tokens[1:]


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ValueError
    return value


def by_code(answers: Sequence[DrawnAnswer], config: RewardConfig, workers: SealedWorkers) -> list[float]:
    """Return the share of a line's tests that the answer's code passes, from the first on. Code that several answers to
    a line share runs once."""
    codes = [(_source(each), id(each.record)) for each in answers]
    alone = dict(zip(codes, answers, strict=True))

    def share(answer: DrawnAnswer) -> float:
        calls = [CodeCall(arguments, expected) for arguments, expected in answer.record["tests"]]
        return workers.passed(_source(answer), answer.record["entry"], calls) / len(calls)

    with ThreadPoolExecutor(workers.count) as threads:
        shares = dict(zip(alone, threads.map(share, alone.values()), strict=True))
    return [shares[code] for code in codes]


def by_solved(answers: Sequence[DrawnAnswer], config: RewardConfig, workers: SealedWorkers) -> list[float]:
    """Return 1 for code that passes all of a line's tests, else 0. A share of the tests also rewards a constant that is
    right for some of them."""
    return [float(share == 1) for share in by_code(answers, config, workers)]


def _source(answer: DrawnAnswer) -> str:
    return str(answer.record.get("prefix", "")) + code_in(answer.text)


def code_in(text: str) -> str:
    """Return the code of an answer: its last block between fences, or all of it."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _check_length(record: Mapping[str, Any], config: RewardConfig) -> None:
    target = record.get("target", config.target)
    if type(target) is not int or target < 1:
        raise InvalidConfig(f"the length's target must be a number of tokens above 0, got {target!r}.")


def _check_regex(record: Mapping[str, Any], config: RewardConfig) -> None:
    pattern = record.get("pattern", config.pattern)
    if not isinstance(pattern, str) or not pattern:
        raise InvalidConfig("the reward regex needs a pattern, in the line or as --pattern.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidConfig(f"{pattern!r} is no expression ({error}).") from error


def _check_arithmetic(record: Mapping[str, Any], config: RewardConfig) -> None:
    if calculated(str(record.get("answer", ""))) is None:
        raise InvalidConfig(f"the reward arithmetic needs a number as answer, got {record.get('answer')!r}.")


def _check_code(record: Mapping[str, Any], config: RewardConfig) -> None:
    tests, entry = record.get("tests"), record.get("entry")
    paired = isinstance(tests, list) and tests and all(isinstance(t, list) and len(t) == 2 for t in tests)
    if not paired or not all(isinstance(arguments, list) for arguments, _ in tests or ()):
        raise InvalidConfig("rewards for code need tests: a list of [[arguments, …], expected].")
    if not isinstance(entry, str) or not entry.isidentifier():
        raise InvalidConfig(f"rewards for code need the name of a function as entry, got {entry!r}.")


REWARDS: Mapping[str, Callable[[Sequence[DrawnAnswer], RewardConfig, SealedWorkers], list[float]]] = {
    "length": by_length,
    "regex": by_regex,
    "arithmetic": by_arithmetic,
    "code": by_code,
    "solved": by_solved,
}
CHECKS: Mapping[str, Callable[[Mapping[str, Any], RewardConfig], None]] = {
    "length": _check_length,
    "regex": _check_regex,
    "arithmetic": _check_arithmetic,
    "code": _check_code,
    "solved": _check_code,
}
