"""Experiment tracking: a run's parameters, its figures by step and its files, kept by one of three trackers.

jsonl needs nothing. tensorboard and mlflow are extras, and are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import quote

from ridgeline.core.errors import InvalidConfig

EXPERIMENT = "ridgeline"  # in MLflow, which groups runs
MOST, MOST_PARAMETERS = 1000, 100  # that MLflow takes at once

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A tracker keeps one run. `run` comes first and `close` last."""

    def run(self, name: str, parameters: Mapping[str, object]) -> None:
        """Begin the run."""

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep figures of one step. None means that a figure is not known, and is left out."""

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file; TensorBoard has no files, and keeps its path."""

    def close(self, *, failed: bool = False) -> None:
        """End the run."""


class Untracked:
    """The tracker of a run without `--track`: it keeps nothing."""

    def run(self, name: str, parameters: Mapping[str, object]) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


UNTRACKED = Untracked()


class JsonLines:
    """A folder for each run: `run.jsonl` with one event a line, and `artifacts/`.

    The events: run (name, date, parameters), metrics (step, seconds since the run began, values), artifact (file) and
    end (seconds, failed). A figure that is not finite is the text "nan", "inf" or "-inf": JSON has no number for it.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._begun = time.monotonic()

    def run(self, name: str, parameters: Mapping[str, object]) -> None:
        self.folder = _folder(self._root, name)
        self._file = (self.folder / "run.jsonl").open("x", encoding="utf-8")
        date = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write("run", name=name, date=date, parameters=dict(parameters))

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {name: value if math.isfinite(value) else str(float(value)) for name, value in _known(values).items()}
        self._write("metrics", step=step, seconds=self._seconds(), values=known)

    def artifact(self, path: Path) -> None:
        kept = self.folder / "artifacts" / path.name
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, kept)
        self._write("artifact", file=str(kept.relative_to(self.folder)))

    def close(self, *, failed: bool = False) -> None:
        self._write("end", seconds=self._seconds(), failed=failed)
        self._file.close()

    def _seconds(self) -> float:
        return round(time.monotonic() - self._begun, 3)

    def _write(self, event: str, **fields: object) -> None:
        self._file.write(json.dumps({"event": event, **fields}, default=str, ensure_ascii=False) + "\n")
        self._file.flush()


class TensorBoard:
    """A folder for each run with TensorBoard's file of events: parameters and the paths of files are texts."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._writers = _imported("torch.utils.tensorboard", "tensorboard")

    def run(self, name: str, parameters: Mapping[str, object]) -> None:
        self._writer: Any = self._writers.SummaryWriter(str(_folder(self._root, name)))
        lines = [f"| {key} | {value} |" for key, value in parameters.items()]
        self._writer.add_text("parameters", "\n".join(["| parameter | value |", "|---|---|", *lines]))

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in _known(values).items():
            self._writer.add_scalar(name, value, step)

    def artifact(self, path: Path) -> None:
        self._writer.add_text("artifact", str(path.resolve()))

    def close(self, *, failed: bool = False) -> None:
        self._writer.add_text("end", "failed" if failed else "finished")
        self._writer.close()


class MLflow:
    """A run of MLflow's experiment `ridgeline`: on the server of MLFLOW_TRACKING_URI, else in `mlflow.db` of the folder
    with the files beside it."""

    def __init__(self, folder: Path) -> None:
        module, entities = _imported("mlflow.tracking", "mlflow"), _imported("mlflow.entities", "mlflow")
        for package in ("sqlalchemy", "alembic"):  # mlflow-skinny misses them late
            _imported(package, "mlflow")
        uri, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            _made(folder)
            uri, files = f"sqlite:///{folder.resolve() / 'mlflow.db'}", (folder.resolve() / "artifacts").as_uri()
        self._client, self._files, self._entities = module.MlflowClient(uri), files, entities

    def run(self, name: str, parameters: Mapping[str, object]) -> None:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT, self._files)
        self._id: str = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._entities.Param(_named(key), str(value)) for key, value in parameters.items()]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMETERS])

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        now = int(1000 * time.time())
        made = [self._entities.Metric(_named(name), value, now, step) for name, value in _known(values).items()]
        for start in range(0, len(made), MOST):
            self._client.log_batch(self._id, metrics=made[start : start + MOST])

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"jsonl": JsonLines, "tensorboard": TensorBoard, "mlflow": MLflow}


class Steady:
    """A tracker whose failures do not end what it tracks: the first one is a warning, and the run goes on without."""

    def __init__(self, inner: Tracker) -> None:
        self._inner, self._works = inner, True

    def run(self, name: str, parameters: Mapping[str, object]) -> None:
        """Begin the run. Raise InvalidConfig if the tracker cannot."""
        try:
            self._inner.run(name, parameters)
        except Exception as error:  # of a library of others', before anything was measured
            raise InvalidConfig(f"--track cannot begin a run ({error}); look at --track-to and the server.") from error

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        self._try(lambda: self._inner.metrics(step, values))

    def artifact(self, path: Path) -> None:
        self._try(lambda: self._inner.artifact(path))

    def close(self, *, failed: bool = False) -> None:
        self._try(lambda: self._inner.close(failed=failed))

    def _try(self, work: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            work()
        except Exception as error:  # a disk that is full, or a server that is gone
            self._works = False
            logger.warning("the tracker of this run failed and keeps no more of it: %s", error)


def tracker(kind: str, folder: Path) -> Tracker:
    """Return a tracker of this kind whose runs are kept in `folder`; "" tracks nothing.

    Raise InvalidConfig for another kind, or one whose package is missing.
    """
    if not kind:
        return UNTRACKED
    if kind not in TRACKERS:
        raise InvalidConfig(f"--track takes {', '.join(TRACKERS)}, got {kind!r}.")
    return Steady(TRACKERS[kind](folder))


def _imported(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        raise InvalidConfig(
            f"--track {extra} needs {name}, which is not installed; pip install 'ridgeline[{extra}]'."
        ) from error


def _folder(root: Path, name: str) -> Path:
    """Make the folder of a run, which no other run has: its name and the time, to the microsecond."""
    return _made(root / f"{quote(name, safe=' ').replace(' ', '-')}-{datetime.now():%Y%m%d-%H%M%S-%f}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _named(name: str) -> str:
    """Return a name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name)
