"""The tables of docs/onnx.md, from the stored results of `onnx_export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ridgeline.perf.footprint import parameters
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts.experiments_page import Line, filled, grouped, markdown, newest, stored, wrapped

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "onnx-cpu.jsonl", ROOT / "docs" / "onnx.md"
SHAPES = ROOT / "benchmarks" / "models"


def sessions(lines: Sequence[Line]) -> list[Line]:
    """Return the newest line of each session."""
    return newest((line for line in lines if "opset" in line), "model", "opset", "level", "provider")


def speeds(lines: Sequence[Line]) -> list[str]:
    """Return a table for each model: the engine, and each opset and level."""
    found = []
    for group in grouped(newest(lines, "model", "engine", "opset", "level", "provider"), "model"):
        first, rows = group[0], []
        for line in group:
            named = f"opset {line['opset']}, {line['level']}" if "opset" in line else "Ridgeline"
            nodes = str(sum(line["nodes"].values())) if "nodes" in line else "-"
            times = ["wrong", "-"] if "fault" in line else [f"{line[key]:.1f}" for key in ("first_ms", "token_ms")]
            rows.append([named, nodes, *times])
        sentence = (
            f"{first['model']}, {first['layers']} layers, {first['weights_gb']:.2f} GB in float32, {first['threads']} "
            f"threads of {first['machine']['cpu'].rpartition(' x ')[0]}, a prompt of {first['prompt']} tokens and "
            f"{first['tokens']} behind it, {first['date'][:10]}:"
        )
        found += [*wrapped(sentence), "", *markdown(["", "nodes", "ms to the first token", "ms a token"], rows), ""]
    return found


def changes(lines: Sequence[Line]) -> list[str]:
    """Return a table for each model and opset: the passes that changed the graph at each level."""
    found = []
    for group in grouped(sessions(lines), "model", "opset"):
        rows = [
            [line["level"], f"{len(line['passes'])} of {line['tried']}", ", ".join(line["passes"]) or "-"]
            for line in group
        ]
        found += [f"{group[0]['model']}, opset {group[0]['opset']}:", ""]
        found += [*markdown(["level", "changed something", "which"], rows), ""]
    return found


def operators(lines: Sequence[Line]) -> list[str]:
    """Return a table for each model and opset: the nodes of each operator whose number some level changed."""
    found = []
    for group in grouped(sessions(lines), "model", "opset"):
        counts: list[Mapping[str, int]] = [line["nodes"] for line in group]
        names = sorted({name for each in counts for name in each}, key=lambda n: (-max(c.get(n, 0) for c in counts), n))
        rows = [[name, *(str(each.get(name, 0)) for each in counts)] for name in names]
        changed = [row for row in rows if len(set(row[1:])) > 1]
        rows = [*changed, ["all", *(str(sum(each.values())) for each in counts)]]
        found += [f"{group[0]['model']}, opset {group[0]['opset']}:", ""]
        found += [*markdown(["operator", *(line["level"] for line in group)], rows), ""]
    return found


def larger(lines: Sequence[Line]) -> list[str]:
    """Return the bytes of 1B and 8B by arithmetic, and their time at the rate of the largest measured model."""
    largest = max(sessions(lines), key=lambda line: (line["weights_gb"], -line.get("token_ms", 0.0)))
    rate, rows = largest["weights_gb"] / largest["token_ms"], []  # GB a millisecond
    for shape in ("llama-1b", "llama-8b"):
        spec = read_model_config(SHAPES / shape).spec
        count = parameters(spec).total
        kept = sum(state.token_bytes("float32") for layer in spec.layers for state in layer.mixer.states)  # type: ignore[union-attr]
        rows.append([
            shape, f"{count / 1e9:.2f}", f"{4 * count / 1e9:.1f}", f"{2 * count / 1e9:.1f}", f"{kept / 1e6:.3f}",
            f"{4 * count / 1e9 / rate:.0f}",
        ])  # fmt: skip
    heads = ["shape", "parameters, 10⁹", "GB in float32", "GB in 16 bits", "MB of cache a token", "ms a token"]
    sentence = (
        f"The last column is float32 at the {1e3 * rate:.1f} GB/s of weights that {largest['model']} reached in the "
        f"table above (opset {largest['opset']}, {largest['level']}):"
    )
    return [*wrapped(sentence), "", *markdown(heads, rows), ""]


def families(lines: Sequence[Line]) -> list[str]:
    """Return a table of the small random models: nodes at each level, and the operators that each level takes out."""
    rows = []
    for line in newest(lines, "model", "opset"):
        counts = list(line["nodes"].values())
        taken, before = [], counts[0]
        for after in counts[1:]:
            gone = [
                f"{before[name] - after.get(name, 0)} {name}" for name in before if before[name] > after.get(name, 0)
            ]
            taken.append(", ".join(gone) or "-")
            before = after
        sizes = ", ".join(str(sum(each.values())) for each in counts)
        rows.append(
            [line["model"], str(line["opset"]), sizes, *taken, f"{max(line['error'], line['error_to_ours']):.0e}"]
        )
    levels = [f"taken out by {name}" for name in list(lines[-1]["nodes"])[1:]]
    return [*markdown(["family", "opset", "nodes", *levels, "largest difference"], rows), ""]


TABLES: Mapping[str, Callable[[Sequence[Line]], list[str]]] = {
    "speeds": speeds, "passes": changes, "operators": operators, "larger": larger,
}  # fmt: skip


def page(text: str, lines: Sequence[Line]) -> str:
    """Return the page with the tables of these results."""
    whole = [line for line in lines if line["workload"] == "onnx"]
    for name, make in TABLES.items():
        text = filled(text, name, make(whole) if whole else [], PAGE.name)
    small = [line for line in lines if line["workload"] == "onnx family"]
    return filled(text, "families", families(small) if small else [], PAGE.name)


def write() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), stored(RESULTS)), encoding="utf-8")
