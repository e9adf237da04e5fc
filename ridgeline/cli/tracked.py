"""`--track`: the options of commands whose runs a tracker keeps, and the run around such a command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.tracking import UNTRACKED, Tracker, tracker


@dataclass(frozen=True)
class TrackFlags:
    """The tracker of a run, and where it keeps runs."""

    track: Annotated[str, typer.Option(help="Keep the run with jsonl, tensorboard or mlflow.")] = ""
    track_to: Annotated[Path, typer.Option(help="Folder of the runs that are kept.")] = Path("runs")


@contextmanager
def tracked(flags: TrackFlags, name: str, *parameters: Mapping[str, object]) -> Iterator[Tracker]:
    """Begin a run with these parameters, without those that are empty, and close it whatever happens. A command that
    leaves with exit code 0 has not failed. Of processes that torchrun has started the first one's run is kept."""
    first = os.environ.get("RANK", "0") == "0"
    kept = tracker(flags.track, flags.track_to) if first else UNTRACKED
    given = {key: value for each in parameters for key, value in each.items() if value not in ("", None, {})}
    kept.run(name, given)
    failed = True
    try:
        yield kept
        failed = False
    except typer.Exit as left:
        failed = bool(left.exit_code)
        raise
    finally:
        kept.close(failed=failed)
