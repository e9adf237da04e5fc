"""The way of a step through our own code, as a profiler's hook sees it: files and functions entered.

    python -m ridgeline_bench.scripts.walk [--calls]

The first step is that of `LLM.generate("x")` on a CPU with the embedded model, from the call to the moment when the
worker's thread has drawn the first token. The steady step is a decode step of eight requests, with what the caller does
with its tokens. Functions of the standard library and of other packages are not counted. Neither is what runs only
once, since the engine has answered other prompts before.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.engine.engine import Engine
from ridgeline.worker.local import LocalWorker
from ridgeline_bench.scripts.asked import asked

ROOT = Path(ridgeline.__file__).parent
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
UNNAMED = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


@dataclass
class Walk:
    """(file, function) in the order in which they were first entered, with how often."""

    entered: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """A hook for `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            self.entered[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.entered))

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The functions that have a name of their own."""
        return [(file, name) for file, name in self.entered if name.rsplit(".", 1)[-1] not in UNNAMED]

    def calls(self, room: str = "") -> int:
        return sum(count for (file, _), count in self.entered.items() if file.startswith(room))


def opened(running: int) -> LLM:
    """Return an engine that has answered so many prompts together."""
    llm = LLM(device="cpu", max_num_seqs=max(2, running), max_model_len=256)
    llm.generate(["warm up"] * running, PARAMS, use_tqdm=False)
    llm.engine._worker._threads = None  # type: ignore[attr-defined]  # whether they may change depends on the machine
    return llm


def walk(prompt: str = "x") -> tuple[Walk, Walk]:
    """Return the functions that the caller's thread enters before its first step waits for the worker, and those that
    the worker's thread enters for that step."""
    llm = opened(1)
    caller, worker, worker_class = Walk(), Walk(), type(llm.engine._worker)
    own = threading.current_thread()
    submitted = threading.Event()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if threading.current_thread() is own:
            if not submitted.is_set():
                caller.note(frame, event, argument)
            if event == "return" and frame.f_code is worker_class.submit.__code__:
                submitted.set()
        elif len(done) == 0:
            worker.note(frame, event, argument)

    done: list[bool] = []
    collect = llm.engine._worker.collect

    def collected() -> Any:
        result = collect()
        done.append(True)
        return result

    llm.engine._worker.collect = collected  # type: ignore[method-assign]
    with hooked(llm, hook):
        llm.generate(prompt, PARAMS, use_tqdm=False)
    return caller, worker


class Steady(NamedTuple):
    """The functions that a steady step enters. engine: in `Engine.step`, which waits for a result and makes a plan.
    text: between two of these, where tokens become text. worker: in the worker's thread, for one plan."""

    engine: Walk
    text: Walk
    worker: Walk


def steady_walk(running: int = 8, step: int = 10) -> Steady:
    """Follow a decode step of so many requests."""
    llm = opened(running)
    found, own = Steady(Walk(), Walk(), Walk()), threading.current_thread()
    steps, starts = Engine.step.__code__, LocalWorker._start.__code__
    stepped = started = 0
    inside = False

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal stepped, started, inside
        if threading.current_thread() is not own:
            started += event == "call" and frame.f_code is starts
            if started == step + 1:
                found.worker.note(frame, event, argument)
            return
        if event == "call" and frame.f_code is steps:
            stepped, inside = stepped + 1, True
        if stepped == step:
            (found.engine if inside else found.text).note(frame, event, argument)
        if event == "return" and frame.f_code is steps:
            inside = False

    with hooked(llm, hook):
        llm.generate(["x"] * running, replace(PARAMS, max_tokens=step + 10), use_tqdm=False)
    return found


@contextmanager
def hooked(llm: LLM, hook: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Let a hook see what this thread and the worker's enter."""
    pool = llm.engine._worker._thread  # type: ignore[attr-defined]
    pool.submit(sys.setprofile, hook).result()
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        pool.submit(sys.setprofile, None).result()


def main() -> None:
    show_calls = asked(__doc__, calls=(False, "Print how often each function was entered.")).calls
    first, steady = walk(), steady_walk()
    all_found = dict(zip(("first step, before the worker's thread", "first step, in it"), first, strict=True))
    all_found |= {f"steady step, {where}": found for where, found in steady._asdict().items()}
    for where, found in all_found.items():
        print(f"\n{where}: {len(found.files)} files, {len(found.functions)} functions, {found.calls()} entered")
        ops = {file for file in found.files if file.startswith("kernels/")}
        if ops:
            inside = sum(file in ops for file, _ in found.functions)
            print(f"  of these in ops, as plain references: {len(ops)} files, {inside} functions")
        for file in found.files:
            names = [
                f"{name} x{found.entered[file, name]}" if show_calls else name
                for of, name in found.functions
                if of == file
            ]
            print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
