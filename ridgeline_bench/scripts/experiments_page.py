"""Write the tables of docs/experiments.md, and its picture, from the stored results of its experiments.

    python -m ridgeline_bench.scripts.experiments_page [--results benchmarks/results/experiments.jsonl]

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`, and nothing does if no result is stored.
Where a figure was measured again, the newest counts. A test compares the page with the results.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts import batch_sweep, host_layers
from ridgeline_bench.scripts.asked import asked
from ridgeline_bench.scripts.formats_page import stored_quality
from ridgeline_bench.scripts.weight_forms import split

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "experiments.jsonl", ROOT / "docs" / "experiments.md"
PICTURE = ROOT / "docs" / "images" / "batch-sweep.svg"
Line = Mapping[str, Any]


def newest(lines: Iterable[Line], *keys: str) -> list[Line]:
    """Return the last line of each value of the keys, in the order in which these came first."""
    found: dict[tuple[str, ...], Line] = {}
    for line in lines:
        found[tuple(json.dumps(line.get(key)) for key in keys)] = line
    return list(found.values())


def grouped(lines: Iterable[Line], *keys: str) -> list[list[Line]]:
    """Return the lines that agree in all keys, together."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(json.dumps(line.get(key)) for key in keys), []).append(line)
    return list(found.values())


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def where(line: Line) -> str:
    """Return the sentence that names what was measured, and when."""
    return f"{line['model']} on {line['gpu'] or 'a CPU'}, {line['date'][:10]}:"


def formats(lines: list[Line]) -> list[str]:
    found, quality = [], stored_quality()
    for group in grouped(newest(lines, "model", "gpu", "form"), "model", "gpu"):
        there = [line for line in group if "left_out" not in line]
        if not there:
            continue
        batches, rows = list(there[0]["tokens_per_second"]), []
        for line in there:
            rates, limits, gb = line["tokens_per_second"], line["limit_tokens_per_second"], line["weights_gb"]
            share = f"{100 * rates[batches[-1]] / limits[batches[-1]]:.0f} %" if limits else "-"
            known = quality.get(split(line["form"])[0].quality)
            rows.append([
                line["form"], str(line["devices"]), f"{gb * line['devices']:.1f}", f"{line['ttft_ms']:.1f}",
                *(f"{rates[batch]:,.0f}" for batch in batches), share, f"{known:.3f}" if known else "-",
            ])  # fmt: skip
        heads = ["form", "GPUs", "GB of weights", "TTFT, ms", *(f"tokens/s at {batch}" for batch in batches)]
        found += [where(there[0]), "", *markdown([*heads, "of the limit", "perplexity"], rows), ""]
    return found


def gains(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "step"), "model", "gpu"):
        heads = ["step", "tokens/s", "gain", "in all", "engine's steps", "mean latency, s"]
        rows = [
            [line["step"], f"{line['tokens_per_second']:,.0f}", f"{line['gain']:.2f}", f"{line['gain_in_all']:.2f}",
             str(line["steps"]), f"{line['latency_mean_s']:.2f}"]
            for line in group
        ]  # fmt: skip
        best = max(group, key=lambda line: line["gain"])
        sentence = f"The largest single gain is that of {best['step']}: {best['gain']:.2f} times the rate before it."
        found += [where(group[0]), "", *markdown(heads, rows), "", *wrapped(sentence), ""]
    return found


def sweep(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "batch"), "model", "gpu"):
        heads = ["batch", "ms a step", "limit, ms", "tokens/s", "TTFT, ms", "last TTFT, ms"]
        rows = [
            [str(line["batch"]), f"{line['step_ms']:.2f}", f"{line['limit_ms']:.2f}",
             f"{line['tokens_per_second']:,.0f}",
             *(f"{line[key]:.1f}" if key in line else "-" for key in ("ttft_ms", "ttft_last_ms"))]
            for line in group
        ]  # fmt: skip
        told = {name: "none" if at is None else f"{at:.0f}" for name, at in batch_sweep.crossovers(group).items()}
        sentence = (
            f"Crossover: {told['measured']} tokens measured, {told['limit']} of the limits in the same way, "
            f"{told['planner']} by the planner."
        )
        found += [where(group[0]), "", *markdown(heads, rows), "", sentence, ""]
    return found


def static(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "way", "slots"), "model", "gpu", "slots"):
        heads = ["way", "tokens/s", "engine's steps", "at least", "thrown away", "mean latency, s"]
        rows = [
            [line["way"], f"{line['tokens_per_second']:,.0f}", str(line["steps"]), str(line["least_steps"]),
             f"{100 * line['wasted']:.0f} %", f"{line['latency_mean_s']:.2f}"]
            for line in group
        ]  # fmt: skip
        found += [where(group[0]), "", *markdown(heads, rows), ""]
        way = {line["way"]: line for line in group}
        if {"static", "continuous"} <= way.keys():
            gain = way["continuous"]["tokens_per_second"] / way["static"]["tokens_per_second"]
            more = way["static"]["steps"] / way["continuous"]["steps"]
            sentence = f"Continuous batches have {gain:.2f} times the rate of static ones, which take {more:.2f} times"
            found += [*wrapped(f"{sentence} as many steps."), ""]
    return found


def chunks(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "chunk"), "model", "gpu"):
        heads = ["chunk", "steps of a prompt", "ITL p50 / p99 / longest, ms", "step at least, ms", "TTFT, ms"]
        rows = [
            [str(line["chunk"]), str(line["steps_of_a_prompt"]),
             " / ".join(f"{line[f'itl_{name}_ms']:.1f}" for name in ("p50", "p99", "max")),
             f"{line['least_step_ms']:.1f}", f"{line['ttft_ms']:.0f}", f"{line['prompt_tokens_per_second']:,.0f}"]
            for line in group
        ]  # fmt: skip
        least, most = (choose(group, key=lambda line: line["chunk"]) for choose in (min, max))
        sentence = (
            f"Chunks of {least['chunk']} in place of {most['chunk']} tokens make the 99th percentile of ITL "
            f"{most['itl_p99_ms'] / least['itl_p99_ms']:.0f} times smaller and TTFT "
            f"{least['ttft_ms'] / most['ttft_ms']:.2f} times as long."
        )
        table = markdown([*heads, "prompt tokens/s"], rows)
        found += [where(group[0]), "", *table, "", *wrapped(sentence), ""]
    return found


def mixture(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(lines, "model", "gpu", "form"):
        memory = next(line["memory"] for line in reversed(group) if "memory" in line)
        routes = [line["routes"]["imbalance_of_layers"] for line in group if "routes" in line]
        heads = ["batch", "experts with tokens", "uniform routing", "ms a step", "tokens/s", "of the limit"]
        rows = []
        for line in newest((line for line in group if "batch" in line), "batch"):
            rate, limit = line["tokens_per_second"], line["limit_tokens_per_second"]
            rows.append([
                str(line["batch"]), f"{line['experts_with_tokens']:.2f}", f"{line['uniform']:.2f}",
                f"{line['step_ms']:.2f}", f"{rate:,.0f}", f"{100 * rate / limit:.0f} %" if limit else "-",
            ])  # fmt: skip
        sentence = (
            f"Weights ({group[0]['form']}) take {memory['weights_gb']:.1f} GB a GPU, and experts are "
            f"{100 * memory['expert_share_of_parameters']:.1f} % of the parameters."
        )
        if routes:
            least, most = min(routes[-1]), max(routes[-1])
            sentence += f" A layer's busiest expert has {least:.2f} to {most:.2f} times the mean."
        found += [where(group[-1]), "", *wrapped(sentence), "", *markdown(heads, rows), ""]
    return found


def padded(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "shape", "gpu", "tokens", "skew", "way"), "shape", "gpu"):
        heads = [
            "tokens",
            "busiest",
            "grouped, ms",
            "TFLOP/s",
            "padded, ms",
            "TFLOP/s",
            "useful rows",
            "1.25, ms",
            "dropped",
            "one by one, ms",
        ]
        rows = []
        for case in grouped(group, "tokens", "skew"):
            way = {line["way"]: line for line in case}
            rows.append([
                str(case[0]["tokens"]), f"{case[0]['imbalance']:.2f}",
                *(cell for name in ("grouped", "padded, all") for cell in (
                    f"{way[name]['ms']:.3f}", f"{way[name]['tflops']:.0f}",
                )),
                f"{100 * way['padded, all']['useful']:.0f} %",
                f"{way['padded, 1.25']['ms']:.3f}", f"{100 * way['padded, 1.25']['dropped']:.1f} %",
                f"{way['one by one']['ms']:.3f}",
            ])  # fmt: skip
        named = {"model": group[0]["shape"], "gpu": group[0]["gpu"], "date": group[-1]["date"]}
        found += [where(named), "", *markdown(heads, rows), "", *wrapped(_of_padding(group)), ""]
    return found


def _of_padding(lines: Sequence[Line]) -> str:
    """Return the sentence that says what padding costs with the most tokens, with even and with uneven routes."""
    most = max(line["tokens"] for line in lines)
    skews = sorted({line["skew"] for line in lines if line["tokens"] == most})
    told = []
    for skew in dict.fromkeys((skews[0], skews[-1])):
        way = {line["way"]: line for line in lines if (line["tokens"], line["skew"]) == (most, skew)}
        grouped, padded = (way[name]["tflops"] for name in ("grouped", "padded, all"))
        told.append(
            f"{padded:.0f} in place of {grouped:.0f} where the busiest expert has {way['grouped']['imbalance']:.2f} "
            f"times the mean, which is {100 * padded / grouped:.0f} %"
        )
    return f"With {most:,} tokens padded products reach, in useful TFLOP/s, {'; '.join(told)}."


def divided(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "form", "devices", "layers"), "model", "gpu", "form", "devices"):
        named = {**group[-1], "model": f"{group[0]['model']} in {group[0]['form']}"}
        sentence = where(named).replace(" on ", f" on {group[0]['devices']} of ", 1)
        found += [sentence, "", *markdown(host_layers.HEADS, host_layers.rows(group)), ""]
    return found


def agents(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(newest(lines, "model", "gpu", "engine", "way"), "model", "gpu", "engine"):
        heads = ["way", "first step, s", "a later one, s", "tokens of prompts", "of which ran", "least", "written/s"]
        rows = [
            [line["way"], *(f"{line[name]:.3f}" for name in ("first_step_s", "later_step_s")),
             *(f"{line[name]:,}" for name in ("prompt_tokens", "ran", "least")), f"{line['written_per_second']:,.0f}"]
            for line in group
        ]  # fmt: skip
        found += [where(group[0]).replace(" on ", f", {group[0]['engine']}, on ", 1), "", *markdown(heads, rows), ""]
    return found


def search(lines: list[Line]) -> list[str]:
    found = []
    for group in grouped(lines, "model", "workload"):
        newest_of = {line["metric"]: line for line in group}
        most, output = newest_of["requests"], newest_of["output"]
        asked_for = most["options"]
        named = {"model": most["model"], "gpu": most["machine"]["gpu"], "date": most["date"]}
        sentence = (
            f"{where(named)} {most['value']:g} requests/s with {output['value']:,.0f} output tokens/s meet "
            f"`{asked_for['slo']}`, with prompts of {asked_for['input_len']} and answers of {asked_for['output_len']} "
            f"tokens; {asked_for['missing']:g} requests/s miss it."
        )
        found += [*wrapped(sentence), ""]
    return found


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph, of 100 characters at most."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


TABLES: Mapping[str, tuple[str, Callable[[list[Line]], list[str]]]] = {
    "formats": ("formats page", formats),
    "gains": ("stacked gains", gains),
    "sweep": ("batch sweep", sweep),
    "static": ("batching", static),
    "chunks": ("chunk sizes", chunks),
    "search": ("most within", search),
    "mixture": ("mixture use", mixture),
    "padded": ("padded experts", padded),
    "agents": ("agents", agents),
    "divided": ("host layers", divided),
}


def filled(text: str, name: str, made: Sequence[str], page: str) -> str:
    """Return the text of a page with these lines between the comments of a table. Raise SystemExit if it has none."""
    inside = "\n".join(made).strip()
    block = f"<!-- table: {name} -->\n" + (f"\n{inside}\n\n" if inside else "") + "<!-- end -->"
    pattern = re.compile(rf"<!-- table: {name} -->\n.*?<!-- end -->", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"docs/{page} has no place for the table {name}.")
    return pattern.sub(lambda _: block, text)


def page(text: str, lines: Sequence[Line]) -> str:
    """Return the page with the tables of these results."""
    for name, (workload, make) in TABLES.items():
        own = [line for line in lines if line["workload"] == workload or f" {workload} " in line["workload"]]
        text = filled(text, name, make(own) if own else [], PAGE.name)
    return text


def stored(file: Path) -> list[Line]:
    """Return the stored lines, none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    a = asked(__doc__, results=RESULTS)
    lines = stored(a.results)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    if swept := [line for line in lines if line["workload"] == "batch sweep"]:
        batch_sweep.draw(newest(swept, "batch"), PICTURE)


if __name__ == "__main__":
    main()
