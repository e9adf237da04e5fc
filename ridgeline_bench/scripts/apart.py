"""Engines in processes of their own that take turns, so that other work on the machine slows all of them alike; and
what they are asked to do.

OpenMP's threads wait actively for work only if there are no more of them than cores, so two engines in one process
would disturb each other.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
A, R = TypeVar("A"), TypeVar("R")


class Apart(Generic[A, R]):
    """A process that answers one question after the other. `told` is what it said when it was ready."""

    def __init__(self, make: Callable[..., tuple[Any, Callable[[A], R]]], *given: Any) -> None:
        """Start the process. There `make(*given)` returns the value of `told`, and the function that answers."""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, given), daemon=True)
        self._process.start()
        other.close()
        self.told = self._answer()

    def ask(self, question: A) -> R:
        self._pipe.send(question)
        found: R = self._answer()
        return found

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("a process ended early; its standard error says why") from None

    def close(self) -> None:
        self._pipe.close()  # which ends the process
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., tuple[Any, Callable[[Any], Any]]], given: tuple[Any, ...]) -> None:
    told, answer = make(*given)
    pipe.send(told)
    with suppress(EOFError):  # the other end is gone
        while True:
            pipe.send(answer(pipe.recv()))


def loaded(engine: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return our engine or vLLM's with these arguments of LLM, and its class of sampling parameters."""
    if engine == "vllm":
        os.environ.update(VLLM | os.environ)
        import vllm

        return vllm.LLM(**given), vllm.SamplingParams
    import ridgeline

    return ridgeline.LLM(**given), ridgeline.SamplingParams


def in_turn(ways: Mapping[str, Callable[[], R]], rounds: int) -> Iterator[dict[str, R]]:
    """Yield, for every round, the result of each way by its name."""
    for _ in range(rounds):
        yield {name: way() for name, way in ways.items()}


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def speedup(plain: Sequence[float], times: Sequence[float]) -> float:
    """Return the median of the rounds' ratios, which other work moves least."""
    return statistics.median(a / b for a, b in zip(plain, times, strict=True))


def drawn(draw: random.Random, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def as_prompts(ids: Sequence[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": each} for each in ids]


def own_code(length: int) -> list[str]:
    """Return a piece of so many characters of each long file of this project."""
    files = sorted((Path(__file__).parents[2] / "ridgeline").rglob("*.py"))
    long = [text for file in files if len(text := file.read_text(encoding="utf-8")) > 4 * length]
    return [text[length : 2 * length] for text in long]
