"""The way of a request's first step through our own code, as a profiler's hook sees it: files and functions entered.

    python benchmarks/walk.py [--calls]

It follows `LLM.generate("x")` on a CPU with the embedded model, from the call to the moment when the worker's thread
has drawn the first token. Functions of the standard library and of other packages are not counted. Neither is what
runs only once, since the engine has answered another prompt before.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ridgeline
from ridgeline import LLM, SamplingParams

ROOT = Path(ridgeline.__file__).parent
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
        """Those that have a name of their own."""
        return [(file, name) for file, name in self.entered if name.rsplit(".", 1)[-1] not in UNNAMED]

    def calls(self, room: str = "") -> int:
        return sum(count for (file, _), count in self.entered.items() if file.startswith(room))


def walk(prompt: str = "x") -> tuple[Walk, Walk]:
    """What the caller's thread enters before its first step waits for the worker, and what the worker's thread enters
    for that step."""
    llm = LLM(device="cpu", max_num_seqs=2, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate("warm up", params, use_tqdm=False)
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
    pool = llm.engine._worker._thread  # type: ignore[attr-defined]
    pool.submit(sys.setprofile, hook).result()
    sys.setprofile(hook)
    try:
        llm.generate(prompt, params, use_tqdm=False)
    finally:
        sys.setprofile(None)
        pool.submit(sys.setprofile, None).result()
    return caller, worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="Print how often each function was entered.")
    show_calls = parser.parse_args().calls
    both = dict(zip(("before the worker's thread", "in the worker's thread"), walk(), strict=True))
    for where, found in both.items():
        print(f"\n{where}: {len(found.files)} files, {len(found.functions)} functions, {found.calls()} entered")
        for file in found.files:
            names = [
                f"{name} x{found.entered[file, name]}" if show_calls else name
                for of, name in found.functions
                if of == file
            ]
            print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
