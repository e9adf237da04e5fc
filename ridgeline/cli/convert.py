"""`ridgeline convert`: check a model, and write it as a folder of safetensors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.model import DTYPES

if TYPE_CHECKING:
    from ridgeline.weights.convert.check import Report


def convert(
    source: str = typer.Argument(..., help="Folder, GGUF file or hub id."),
    target: Path = typer.Argument(None, help="Folder to write; it must not exist."),
    dtype: str = typer.Option("auto", help="auto (as it is), float32, bfloat16 or float16."),
    shard_size: str = typer.Option("5GB", help="Largest size of one file, such as 5GB, 500MB or 1GiB."),
    merge: Path | None = typer.Option(None, help="Folder of an adapter (LoRA) to add to the weights."),
    check: bool = typer.Option(False, "--check", help="Only check, and write nothing."),
    as_json: bool = typer.Option(False, "--json", help="JSON on standard output."),
) -> None:
    """Check a model as the loader does, and that its values are numbers; write it as safetensors in shards, with an
    adapter merged into the weights if one is given.

    The folder appears when it is complete. A GGUF file is dequantized, and its tokenizer and templates are written out.
    """
    if check == (target is not None):
        raise InvalidConfig("convert needs a folder to write to, or --check and none.")
    if check and merge is not None:
        raise InvalidConfig("--merge writes a model, and --check writes nothing; leave one of them out.")
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidConfig(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}.")
    from ridgeline.progress import LoadingBar
    from ridgeline.text.gguf_export import write_texts
    from ridgeline.weights.convert import convert as work  # imports torch, which takes seconds
    from ridgeline.weights.convert.shards import parse_size
    from ridgeline.weights.folder import resolve_model

    size, started = parse_size(shard_size), time.perf_counter()
    with LoadingBar() as bar:
        path = resolve_model(source)
        if check:
            report = work.check(path, bar)
        else:
            kind = None if dtype == "auto" else dtype
            how: dict[str, Any] = {"dtype": kind, "shard_size": size, "write_texts": write_texts}
            report = work.convert(path, target, **how, progress=bar, adapter=merge)
    _show(report, target, time.perf_counter() - started, as_json)


def _show(report: Report, target: Path | None, seconds: float, as_json: bool) -> None:
    record = {
        "architecture": report.architecture,
        "tensors": report.tensors,
        "parameters": report.parameters,
        "stored as": ", ".join(f"{count} {dtype}" for dtype, count in report.stored_as.most_common()),
        "not needed": report.copies,
        "written to": None if target is None else str(target),
        "seconds": round(seconds, 2),
    }
    if as_json:
        print(json.dumps(record))
        return
    table = Table(show_header=False)
    for name, value in record.items():
        if value not in (None, []):
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table)
