"""Small Python tasks with tests, made of functions of packages.

    python -m ridgeline_bench.scripts.code_tasks.make --held-out FOLDER --out FOLDER [--seed 0] [--most 0] [--unsafe]

Training tasks come from the standard library and from the permissively licensed packages that are installed here.
Held-out tasks come from the packages in --held-out, a folder into which wheels were unpacked, as
`pip install --no-deps --target FOLDER algorithms boltons …` does. A package that the embedded model was trained on
is refused there, and so is a function that resembles one of the training packages. What is written:

    train.jsonl       one line a task: prompt and completion for `ridgeline train sft`, prefix, entry and tests for
                      the reward `code` of `ridgeline train grpo`
    held-out.jsonl    the same, to measure on
    tasks.json        packages, versions, counts

--most keeps so many functions of each kind, for a trial. --unsafe runs the packages' functions without isolation.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import track

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.corpus import CorpusConfig, Document, build_corpus
from ridgeline.training.packages import Package, installed_packages, standard_library
from ridgeline.training.sandbox import SealedWorkers, refusal
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.code_tasks.arguments import found_tests
from ridgeline_bench.scripts.code_tasks.functions import LoneFunction, lone_functions
from ridgeline_bench.scripts.code_tasks.tasks import GRADES, CodeTask, apart, tasks_of, worthwhile

CARD = Path(__file__).parents[3] / "ridgeline/assets/embedded/README.md"


def main() -> None:
    given = asked(__doc__, held_out=str, out=Path, seed=0, most=0, unsafe=False)
    if not (given.held_out and given.out):
        raise InvalidConfig("give --held-out and --out, a folder each.")
    if not given.unsafe and (why := refusal()) is not None:
        raise InvalidConfig(f"code cannot be isolated here: {why}; --unsafe runs it as this user.")
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    held = list(installed_packages([given.held_out]))
    if not held:
        raise InvalidConfig(f"{given.held_out!r} holds no permissively licensed package; unpack some wheels there.")
    if seen := sorted({each.name for each in held} & trained_on()):
        raise InvalidConfig(f"the embedded model was trained on {', '.join(seen)}; remove it from {given.held_out}.")
    known = [standard_library(), *installed_packages()]
    print(f"reading {len(known)} packages to train on, {len(held)} held out", flush=True)
    training, measuring = documents(known), documents(held)
    functions = apart(lone_functions(training), (), ())
    others = apart(lone_functions(measuring), functions, training)
    Random(given.seed).shuffle(functions)
    written = {"train": functions, "held-out": others}
    report: dict[str, Any] = {
        "packages": {part: versions(each) for part, each in (("train", known), ("held-out", held))}
    }
    for part, candidates in written.items():
        chosen = candidates[: given.most] if given.most else candidates
        tasks = made(chosen, given.seed, isolated=not given.unsafe, part=part)
        (out / f"{part}.jsonl").write_text("".join(json.dumps(task.record()) + "\n" for task in tasks))
        counts = Counter(task.grade for task in tasks)
        report[part] = {
            "functions": len({(task.package, task.name) for task in tasks}), "candidates": len(chosen),
            "grades": {GRADES[grade]: counts[grade] for grade in GRADES},
            "by_package": dict(Counter(task.package for task in tasks).most_common()),
        }  # fmt: skip
        print(f"{part}: {len(tasks):,} tasks of {report[part]['functions']:,} functions, by grade {dict(counts)}")
    (out / "tasks.json").write_text(json.dumps(report, indent=2) + "\n")


def trained_on() -> set[str]:
    """Return the packages that the embedded model's card names."""
    return set(re.findall(r"^\| ([a-z0-9-]+) \| [^|]+\| [^|]+\| (?:train|held out)", CARD.read_text(), re.MULTILINE))


def documents(packages: Sequence[Package]) -> list[Document]:
    return build_corpus(packages, CorpusConfig()).train


def versions(packages: Sequence[Package]) -> dict[str, str]:
    return {each.name: each.version for each in packages}


def made(functions: Sequence[LoneFunction], seed: int, *, isolated: bool, part: str) -> list[CodeTask]:
    """Return the tasks of those functions that can be tested."""

    def each(function: LoneFunction) -> list[CodeTask]:
        tests = found_tests(function, seed, workers)
        return worthwhile(tasks_of(function, tests), function.parameters, workers) if tests else []

    with SealedWorkers(available(), isolated=isolated) as workers, ThreadPoolExecutor(workers.count) as threads:
        found = threads.map(each, functions)
        return [task for tasks in track(found, part, total=len(functions)) for task in tasks]


if __name__ == "__main__":
    with told():
        main()
