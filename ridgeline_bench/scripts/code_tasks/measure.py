"""The share of held-out Python tasks that models solve, side by side, with intervals.

    python -m ridgeline_bench.scripts.code_tasks.measure --tasks held-out.jsonl [--model embedded]
        [--adapters "" tuned/adapter rewarded/adapter] [--samples 8] [--tokens 128] [--most 0]
        [--commit HASH] [--output FILE.jsonl] [--plot FILE.svg] [--unsafe]

Each model answers every task once greedily, and --samples times at temperature 1. An answer ends where the function
ends. A task is solved if all of its tests pass. pass@1 is the mean over tasks. Its interval of 95 % comes from 10,000
draws of functions, since tasks of one function go together; so do those of the difference to the model before, which
is called significant if its interval does not contain 0. "" among --adapters is the model alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.sandbox import SealedWorkers, refusal
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, keep, told
from ridgeline_bench.scripts.code_tasks.arguments import CodeTest
from ridgeline_bench.scripts.code_tasks.tasks import GRADES, CodeTask, share, within

DRAWS = 10_000


class Solved(NamedTuple):
    """The share of answers that solve each task: the greedy one, and those that were drawn."""

    greedy_T: np.ndarray
    drawn_T: np.ndarray


def read_tasks(path: Path, most: int) -> list[CodeTask]:
    found = []
    for line in path.read_text().splitlines()[: most or None]:
        record = json.loads(line)
        names = ("package", "entry", "grade", "prompt", "completion")
        found.append(CodeTask(*(record[name] for name in names), [CodeTest(*each) for each in record["tests"]]))
    if not found:
        raise InvalidConfig(f"{path} holds no task.")
    return found


def solved_by(llm: LLM, tasks: Sequence[CodeTask], request: LoRARequest | None, given: Any) -> Solved:
    shares = []
    for count, temperature in ((1, 0.0), (given.samples, 1.0)):
        params = [
            SamplingParams(n=count, temperature=temperature, max_tokens=given.tokens, seed=index)
            for index in range(len(tasks))
        ]
        outputs = llm.generate([task.prompt for task in tasks], params, lora_request=request)
        jobs = [(t, within(one.text)) for t, output in zip(tasks, outputs, strict=True) for one in output.outputs]
        with SealedWorkers(available(), isolated=not given.unsafe) as run, ThreadPoolExecutor(run.count) as threads:
            passed = list(threads.map(lambda job, run=run: share(*job, run) == 1, jobs))
        shares.append(np.array(passed, dtype=float).reshape(len(tasks), count).mean(1))
    return Solved(*shares)


def interval(value_T: np.ndarray, function_T: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return an interval of 95 % of the mean over tasks, from draws of functions with replacement."""
    names, index_T = np.unique(function_T, return_inverse=True)
    sum_F, count_F = (np.bincount(index_T, weights=each) for each in (value_T, np.ones_like(value_T)))
    chosen_DF = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    low, high = np.quantile((chosen_DF @ sum_F) / (chosen_DF @ count_F), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    given = asked(
        __doc__, tasks=Path, model="embedded", adapters=[""], samples=8, tokens=128, most=0, commit="", output=Path,
        plot=Path, unsafe=False,
    )  # fmt: skip
    if given.tasks is None:
        raise InvalidConfig("give --tasks, a file that code_tasks.make wrote.")
    if not given.unsafe and (why := refusal()) is not None:
        raise InvalidConfig(f"code cannot be isolated here: {why}; --unsafe runs it as this user.")
    tasks = read_tasks(given.tasks, given.most)
    function_T = np.array([f"{task.package} {task.name}" for task in tasks])
    grade_T = np.array([task.grade for task in tasks])
    table = Table("model", "answers", "pass@1", "interval", "gain", "interval", *GRADES.values())
    before: Solved | None = None
    rows = []
    some = [each for each in given.adapters if each]
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 256} if some else {}
    with LLM(given.model, max_model_len=1024, **lora) as llm:
        for number, adapter in enumerate(given.adapters, 1):
            request = LoRARequest(adapter, number, adapter) if adapter else None
            solved = solved_by(llm, tasks, request, given)
            for kind, value_T in solved._asdict().items():
                low, high = interval(value_T, function_T)
                row: dict[str, Any] = {
                    "adapter": _label(adapter), "answers": kind[:-2], "pass_at_1": float(value_T.mean()),
                    "interval": [low, high],
                    "grades": {GRADES[g]: float(value_T[grade_T == g].mean()) for g in GRADES if (grade_T == g).any()},
                }  # fmt: skip
                if before is not None:
                    gain_T = value_T - getattr(before, kind)
                    row |= {"gain": float(gain_T.mean()), "gain_interval": interval(gain_T, function_T)}
                rows.append(row)
                table.add_row(*_shown(row, given.model))
            before = solved
    Console(width=200).print(table)
    print(f"{len(tasks)} tasks of {len(set(function_T))} functions, {given.samples} drawn answers each")
    what = {"workload": "code tasks", "model": given.model, "tasks": len(tasks), "functions": len(set(function_T))}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = asdict(host_with(device, given.commit))
    keep(given.output, {"machine": machine, **what, "samples": given.samples, "rows": rows})
    if given.plot:
        draw(rows, given.plot, given.model)


def _label(adapter: str) -> str:
    """Return the end of a path, which names an adapter wherever its run lies."""
    return "/".join(Path(adapter).parts[-2:])


def _shown(row: dict[str, Any], model: str) -> list[str]:
    def span(ends: Sequence[float]) -> str:
        return f"{ends[0]:.1%} to {ends[1]:.1%}"

    gain = [f"{row['gain']:+.1%}", span(row["gain_interval"])] if "gain" in row else ["", ""]
    grades = [f"{row['grades'].get(each, float('nan')):.1%}" for each in GRADES.values()]
    return [row["adapter"] or model, row["answers"], f"{row['pass_at_1']:.1%}", span(row["interval"]), *gain, *grades]


def draw(rows: Sequence[dict[str, Any]], path: Path, model: str) -> None:
    """Draw the shares with their intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = path.name  # the same picture for the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2))
    names = list(dict.fromkeys(row["adapter"] for row in rows))
    for offset, kind in ((-0.18, "greedy"), (0.18, "drawn")):
        own = [row for row in rows if row["answers"] == kind]
        heights = [100 * row["pass_at_1"] for row in own]
        spread = [
            [h - 100 * row["interval"][0], 100 * row["interval"][1] - h] for h, row in zip(heights, own, strict=True)
        ]
        places = [names.index(row["adapter"]) + offset for row in own]
        axes.bar(places, heights, 0.34, yerr=np.array(spread).T, capsize=3, label=f"{kind} answers")
    axes.set_xticks(range(len(names)), [name or model for name in names])
    axes.set_ylabel("tasks solved, %")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    with told():
        main()
