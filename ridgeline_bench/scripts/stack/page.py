"""Writes the tables of docs/stack.md from the stored results of the scripts beside this one.

    python -m ridgeline_bench.scripts.stack.page

A test compares the page with the results. Where a figure was measured again, the newest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ridgeline_bench.scripts.experiments_page import Line, filled, grouped, markdown, newest, stored, wrapped
from ridgeline_bench.scripts.stack.modes import PATTERNS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "stack.md"
RESULTS = (ROOT / "benchmarks" / "results" / "stack-cpu.jsonl", ROOT / "benchmarks" / "results" / "h200-inductor.jsonl")
MODES = ("torch", "default", "reduce-overhead", "max-autotune")


def breaks(lines: Sequence[Line]) -> list[str]:
    rows = [
        [line["model"], str(line["graphs"]), str(line["breaks"]), ", ".join(f"`{at}`" for at in line["reasons"]) or "-",
         line.get("cause", "-"), line.get("cure", "-"), str(line.get("breaks_left", "-"))]
        for line in newest(lines, "model")
    ]  # fmt: skip
    return [*markdown(["class", "graphs", "breaks", "where", "cause", "cure", "left"], rows), ""]


def _blocks(lines: Sequence[Line]) -> list[Line]:
    """Return what ran on a GPU."""
    return newest((line for line in lines if line["machine"]["gpu"]), "case", "mode")


def modes(lines: Sequence[Line]) -> list[str]:
    """Return a table of the cases that ran on a GPU: milliseconds, and where a mode loses to torch."""
    rows, lines = [], _blocks(lines)
    for group in grouped(lines, "case"):
        by = {line["mode"]: line for line in group}
        best = min(by.values(), key=lambda line: line["ms"])["mode"]
        cells = []
        for mode in MODES:
            line = by.get(mode)
            text = "-" if line is None else f"{line['ms']:.3f}"
            cells.append(f"**{text}**" if mode == best else text)
        loses = [mode for mode in MODES[1:] if mode in by and by[mode]["ms"] > 1.05 * by["torch"]["ms"]]
        first = ", ".join(f"{by[mode]['first_s']:.1f}" for mode in MODES[1:] if mode in by)
        rows.append([group[0]["case"], *cells, first, ", ".join(loses) or "-"])
    machine = lines[-1]["machine"]
    heads = ["case", *MODES, "first calls, s", "5 % slower than torch"]
    return [f"{machine['gpu']}, torch {machine['torch']}, {lines[-1]['date'][:10]}:", "", *markdown(heads, rows), ""]


def kernels(lines: Sequence[Line]) -> list[str]:
    """Return a table of what each mode launches for the blocks."""
    rows = []
    for line in _blocks(lines):
        if "kernels" in line and line["case"].startswith("Llama"):
            kinds = ", ".join(f"{n} {kind}" for kind, n in _counted(line["kernels"].values()).items())
            calls = ", ".join(f"{n} {name.removesuffix('.default')}" for name, n in line["calls"].items()) or "none"
            rows.append([line["case"], line["mode"], str(line["launches"]), kinds, calls])
    return [*markdown(["case", "mode", "launches of kernels", "kernels by kind", "calls of libraries"], rows), ""]


def _counted(words: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:  # type: ignore[attr-defined]
        found[word] = found.get(word, 0) + 1
    return found


def groups(lines: Sequence[Line]) -> list[str]:
    """Return the groups that the default mode fuses in one block, in order, and what Dynamo guards."""
    own = [line for line in _blocks(lines) if line["case"].startswith("Llama")]
    shown = next(line for line in own if line["mode"] == "default")
    rows = [[kind, _ops(name)] for name, kind in shown["kernels"].items()]
    told = next(line for line in own if line["mode"] == "torch" and line["case"] == shown["case"])
    guards, few = sum(told["guards"].values()), list(told["guards"].items())[:5]
    sentence = (
        f"Dynamo makes {told['graphs']} graph of {told['ops']} ops with {told['breaks']} breaks, and {guards} guards; "
        f"the most are {', '.join(f'{name} ({n})' for name, n in few)}."
    )
    return [
        *wrapped(sentence),
        "",
        f"{shown['case']}, default:",
        "",
        *markdown(["kernel", "ops that it fuses"], rows),
        "",
    ]


def _ops(name: str) -> str:
    """Return the ops in a kernel's name."""
    inside = name.partition("_fused_")[2].rpartition("_")[0]
    for whole in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_cudnn_attention",
        "_unsafe_view",
        "_to_copy",
    ):
        inside = inside.replace(whole, whole.replace("_", "·"))
    return ", ".join(part.replace("·", "_").lstrip("_") for part in inside.split("_") if part)


def patterns(lines: Sequence[Line]) -> list[str]:
    """Return a table of the patterns, on the machine on which they ran last."""
    rows: list[list[str]] = []
    own = newest((line for line in lines if line["case"] in PATTERNS), "case", "mode")
    for group in grouped(own, "case"):
        by = {line["mode"]: line for line in group}
        if "default" in by:
            names = ", ".join(_ops(name) for name in by["default"]["kernels"]) or "none"
            calls = ", ".join(by["default"]["calls"]) or "-"
            count = str(len(by["default"]["kernels"]))
            rows.append([group[0]["case"], count, names, calls])
    if not rows:
        return []
    machine = own[-1]["machine"]
    where = f"{machine['gpu'] or machine['cpu'].rpartition(' x ')[0]}, {own[-1]['dtype']}, torch {machine['torch']}:"
    return [where, "", *markdown(["pattern", "kernels", "ops fused", "calls of libraries"], rows), ""]


def starts(lines: Sequence[Line]) -> list[str]:
    own = newest(lines, "way", "state", "layers")
    names = {
        "torch": "torch, no compiler", "specs": "ours, by layer", "dynamo": "ours, through torch.compile",
        "inductor": "Inductor, through torch.compile", "aot": "AOTInductor",
    }  # fmt: skip
    rows = []
    for line in own:
        parts = [f"{line['programs']} programs"] if "programs" in line else []
        parts += [f"a second decoder {line['again_s']:.2f} s"] if "again_s" in line else []
        parts += [f"AOTAutograd and behind it {line['aot_autograd_s']:.1f} s"] if "aot_autograd_s" in line else []
        rows.append([
            names[line["way"]], str(line["layers"]), line["state"], f"{line['first_s']:.1f}",
            f"{line['first_cpu_s']:.1f}", f"{line['ms']:.0f}", "; ".join(parts) or "-",
        ])  # fmt: skip
    heads = ["way", "layers", "caches", "first call, s", "of processors, s", "later calls, ms", "parts"]
    return [*markdown(heads, rows), ""]


def recompiles(lines: Sequence[Line]) -> list[str]:
    own = newest(lines, "way", "backend")
    rows = [
        [line["backend"], line["way"], str(line["graphs"]), f"{line['first_s']:.1f}", f"{line['first_cpu_s']:.1f}",
         f"{line['ms']:.2f}"]
        for line in own
    ]  # fmt: skip
    heads = ["back end", "shapes", "graphs", "first round, s", "of processors, s", "later calls, ms"]
    return [f"{len(own[0]['lengths'])} lengths from 3 to 50:", "", *markdown(heads, rows), ""]


def hlo(lines: Sequence[Line]) -> list[str]:
    line = lines[-1]
    names = sorted({*line["before"], *line["after"]}, key=lambda name: (-line["before"].get(name, 0), name))
    rows = [[name, str(line["before"].get(name, 0)), str(line["after"].get(name, 0))] for name in names]
    total = [["all", str(sum(line["before"].values())), str(sum(line["after"].values()))]]
    done = _counted(each.partition(": ")[2] for each in line["passes"])
    passes = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in done.items())
    memory = ", ".join(f"{value:,} bytes of {name}" for name, value in line["memory"].items())
    inside = "; ".join(f"{at}: {', '.join(ops)}" for at, ops in enumerate(line["fusions"], start=1))
    return [
        *markdown(["instruction", "before", "after, inside fusions too"], [*rows, *total]), "",
        *wrapped(f"Passes that changed the module, in order, with how often: {passes}."), "",
        *wrapped(f"Fusions: {inside}."), "",
        *wrapped(f"Layouts: {', '.join(line['layouts'])}. Buffer assignment: {memory} (jax {line['version']})."), "",
    ]  # fmt: skip


def compilers(lines: Sequence[Line]) -> list[str]:
    own = newest(lines, "way")
    rows = [
        [line["way"], line["version"], f"{line['ready_s']:.1f}", f"{line['ms']:.2f}", f"{line['least_ms']:.2f}"]
        for line in own
    ]
    first = own[0]
    sentence = (
        f"x [{first['tokens']}, {first['width']}], {first['hidden']} wide inside, {first['threads']} threads of "
        f"{first['machine']['cpu'].rpartition(' x ')[0]}, {first['date'][:10]}:"
    )
    return [*wrapped(sentence), "", *markdown(["way", "version", "ready, s", "median, ms", "least, ms"], rows), ""]


TABLES: Mapping[str, tuple[str, Callable[[Sequence[Line]], list[str]]]] = {
    "breaks": ("graph breaks", breaks), "modes": ("inductor mode", modes), "kernels": ("inductor mode", kernels),
    "groups": ("inductor mode", groups), "patterns": ("inductor mode", patterns), "starts": ("compiler start", starts),
    "recompiles": ("recompiles", recompiles), "hlo": ("hlo", hlo), "compilers": ("compilers", compilers),
}  # fmt: skip


def page(text: str, lines: Sequence[Line]) -> str:
    """Return the page with the tables of these results."""
    for name, (workload, make) in TABLES.items():
        own = [line for line in lines if line["workload"] == workload]
        text = filled(text, name, make(own) if own else [], PAGE.name)
    return text


def results() -> list[Line]:
    """Return all stored lines."""
    return [line for file in RESULTS if file.exists() for line in stored(file)]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results()), encoding="utf-8")
