"""The options that `explain`, `plan` and `crossover` share, and the pictures that two of them draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Model = Annotated[str, typer.Argument(help="Folder, config.json or hub id.")]
Gpu = Annotated[str, typer.Option("--gpu", help="Device, such as H200.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@dataclass(frozen=True)
class RateFlags:
    """The precision, and the rates of the device."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, fp8, int8 or int4.")] = "auto"
    kv_dtype: Annotated[str | None, typer.Option(help="Type of the KV cache (default: the activations').")] = None
    datasheet: Annotated[
        bool, typer.Option("--datasheet", help="Use the maker's rates even if measured ones are known.")
    ] = False


@dataclass(frozen=True)
class MeasureFlags:
    """The measurement beside the limits."""

    measure: Annotated[bool, typer.Option("--measure", help="Time every op at its shape on this machine.")] = False
    device: Annotated[str, typer.Option(help="Device to measure on: auto, cpu, cuda or cuda:N.")] = "auto"


def columns(left: Sequence[str], right: Sequence[str]) -> Table:
    """Return a table with columns of names and columns of figures."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def figure(size: tuple[float, float]) -> Figure:
    """Return an empty picture of so many inches. Raise InvalidConfig without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidConfig("--plot needs matplotlib; install ridgeline[train] or matplotlib itself.") from error
    return Figure(figsize=size, layout="constrained")


def logarithmic(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")


def save(figure: Figure, path: Path) -> None:
    """Write a picture, as SVG the same for the same data. Raise InvalidConfig if that is not possible."""
    from matplotlib import rc_context

    undated = {"Date": None} if path.suffix == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "ridgeline"}):
            figure.savefig(path, metadata=undated)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"the plot cannot be written to {path} ({error}).") from error
