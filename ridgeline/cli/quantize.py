"""`ridgeline quantize`: write a model's folder in fewer bits."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.options import with_records
from ridgeline.compression.schemes import FOLDINGS, FORMATS, ROUNDINGS, SCHEMES, MakeConfig
from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from ridgeline.compression.quantize import QuantizedModel

_CALIBRATION, _ROUNDING = "Calibration", "Rounding"


@dataclass(frozen=True)
class SchemeFlags:
    """The schemes, and the modules that get them."""

    scheme: Annotated[
        list[str], typer.Option(help=f"{', '.join(SCHEMES)}. Several: a budget chooses for each module.")
    ] = field(default_factory=lambda: ["w4a16"])
    method: Annotated[
        str, typer.Option(help=f"{', '.join(ROUNDINGS)}; {' or '.join(FOLDINGS)} alone or before +, as in awq+gptq.")
    ] = "rtn"
    format: Annotated[str | None, typer.Option(help=f"{', '.join(FORMATS)}; default: the scheme's own.")] = None
    budget: Annotated[str | None, typer.Option(help="Size of all weights, such as 5GB, for several schemes.")] = None
    ignore: Annotated[
        list[str] | None, typer.Option(help="Modules that stay as they are, such as '*.down_proj' (one or more).")
    ] = None


@dataclass(frozen=True)
class CalibrationFlags:
    """The text that is read, and where."""

    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text, or .jsonl with `text`; default: Python source of the standard library.",
            rich_help_panel=_CALIBRATION,
        ),
    ] = None
    sequences: Annotated[int, typer.Option(help="Sequences to read, at most.", rich_help_panel=_CALIBRATION)] = 128
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; default: 512, or the context.", rich_help_panel=_CALIBRATION),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_CALIBRATION)] = "auto"


@dataclass(frozen=True)
class RoundingFlags:
    """The way to round."""

    group: Annotated[
        int, typer.Option(help="Inputs that share a scale; 0: all of a row.", rich_help_panel=_ROUNDING)
    ] = 128
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without or with zeros; default: as the format has it.",
            rich_help_panel=_ROUNDING,
        ),
    ] = None
    clip: Annotated[
        bool, typer.Option("--clip", help="Search ranges that lessen the error.", rich_help_panel=_ROUNDING)
    ] = False
    act_order: Annotated[
        bool, typer.Option("--act-order", help="GPTQ: columns of large inputs first.", rich_help_panel=_ROUNDING)
    ] = False
    static_groups: Annotated[
        bool,
        typer.Option(
            help="GPTQ: neighbours share a scale in spite of another order, as fast kernels need it.",
            rich_help_panel=_ROUNDING,
        ),
    ] = True
    damping: Annotated[
        float, typer.Option(help="GPTQ: share of the mean added to the diagonal.", rich_help_panel=_ROUNDING)
    ] = 0.01
    alpha: Annotated[
        float, typer.Option(help="SmoothQuant: how much moves to the weights.", rich_help_panel=_ROUNDING)
    ] = 0.5


@with_records
def quantize(
    model: Annotated[str, typer.Argument(help="Folder, hub id, or a model that ships, such as embedded.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    *,
    how: SchemeFlags,
    text: CalibrationFlags,
    rounding: RoundingFlags,
    shard_size: Annotated[str, typer.Option(help="Largest size of one file, such as 5GB or 1GiB.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Quantize a model and write it as a folder that vLLM and transformers load too.

    Embeddings, the output layer, norms and routers stay as they are. The folder appears when it is complete.
    """
    make = MakeConfig(
        schemes=tuple(how.scheme),
        method=how.method,
        format=how.format,
        ignore=tuple(how.ignore or ()),
        budget=None if how.budget is None else _size("budget", how.budget),
        **asdict(rounding),
    )
    make.check()
    if text.calibration is not None and not make.calibrated:
        raise InvalidConfig(f"the method {how.method} reads no text; leave --calibration out, or add --clip.")
    from ridgeline.compression.folder import check_target, write  # imports torch, which takes seconds
    from ridgeline.compression.quantize import quantized
    from ridgeline.defaults import choose_device
    from ridgeline.progress import LoadingBar
    from ridgeline_bench.quality.documents import read_file

    started, shards = time.perf_counter(), _size("shard size", shard_size)
    check_target(out)
    documents = None if text.calibration is None else read_file(text.calibration).documents
    with LoadingBar() as bar:
        made = quantized(
            model,
            make,
            documents=documents,
            count=text.sequences,
            length=text.length,
            device=choose_device(text.device),
            progress=bar,
        )
        num_bytes = write(made, out, shard_size=shards, progress=bar)
    _show(made, out, num_bytes, time.perf_counter() - started, as_json)


def _size(what: str, text: str) -> int:
    from ridgeline.weights.convert.shards import parse_size

    return parse_size(text, what)


def _show(made: QuantizedModel, out: Path, num_bytes: int, seconds: float, as_json: bool) -> None:
    schemes = [each.scheme for each in made.outcome.made.values()]
    record: dict[str, Any] = {
        "scheme": {name: schemes.count(name) for name in sorted(set(schemes))},
        "method": made.make.method,
        "format": made.make.file_format,
        "modules": len(schemes),
        "kept": made.kept,
        "calibration tokens": None if made.tokens_BS is None else made.tokens_BS.numel(),
        "bits per weight": round(made.bits_per_weight, 3),
        "bytes": num_bytes,
        "notes": made.outcome.notes,
        "written to": str(out),
        "seconds": round(seconds, 2),
    }
    if as_json:
        print(json.dumps(record))
        return
    record["scheme"] = ", ".join(f"{name} ({count} modules)" for name, count in record["scheme"].items())
    record["kept"] = ", ".join(made.kept[:4]) + (f" and {len(made.kept) - 4} more" if len(made.kept) > 4 else "")
    record["notes"] = " ".join(made.outcome.notes)
    table = Table(show_header=False)
    for name, value in record.items():
        if value not in (None, "", []):
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)
