"""`--track`: what each tracker keeps of a run, read back by the tracker's own reader."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.core.errors import InvalidConfig
from ridgeline.tracking import UNTRACKED, Steady, Untracked, tracker


@dataclass
class Kept:
    """What a reader found: figures as (step, value) by name, and how the run ended."""

    parameters: dict[str, str]
    figures: dict[str, list[tuple[int, float]]]
    artifact: str
    failed: bool


def read_jsonl(root: Path) -> Kept:
    [folder] = root.iterdir()
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    begun, *between, end = events
    assert (begun["event"], end["event"]) == ("run", "end")
    figures: dict[str, list[tuple[int, float]]] = {}
    files = [folder / event["file"] for event in between if event["event"] == "artifact"]
    for event in between:
        for name, value in event.get("values", {}).items():
            figures.setdefault(name, []).append((event["step"], float(value)))
    parameters = {name: str(value) for name, value in begun["parameters"].items()}
    return Kept(parameters, figures, files[0].read_text() if files else "", end["failed"])


def read_tensorboard(root: Path) -> Kept:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    [folder] = root.iterdir()
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    rows = [line.strip("| ").split(" | ") for line in texts["parameters/text_summary"].splitlines()[2:]]
    figures = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    path = texts.get("artifact/text_summary")
    return Kept(
        dict(rows), figures, Path(path).read_text() if path else "", texts["end/text_summary"] == "failed"
    )  # fmt: skip


def read_mlflow(root: Path) -> Kept:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    client = tracking.MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("ridgeline").experiment_id])
    number = run.info.run_id
    figures = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(number, name)]
        for name in run.data.metrics
    }
    files = client.list_artifacts(number)
    text = Path(client.download_artifacts(number, files[0].path)).read_text() if files else ""
    return Kept(dict(run.data.params), figures, text, run.info.status == "FAILED")


READERS: dict[str, Callable[[Path], Kept]] = {
    "jsonl": read_jsonl,
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
}


@pytest.fixture(params=list(READERS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if request.param != "jsonl":
        pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return str(request.param)


def test_a_run_is_read_back_as_it_was_written(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "curve.svg"
    file.write_text("<svg/>")
    parameters: dict[str, Any] = {"model": "embedded", "steps": 3, "commit": "", "start": None}
    with tracked(TrackFlags(kind, tmp_path / "runs"), "train pretrain", parameters, {"lr": 0.5}) as kept:
        for step in range(3):
            kept.metrics(step, {"tiny/loss": 2.0 - step / 4, "tiny/mfu": None})
        kept.metrics(2, {"tiny/nan": math.nan})
        kept.artifact(file)
    found = READERS[kind](tmp_path / "runs")
    assert found.parameters == {"model": "embedded", "steps": "3", "lr": "0.5"}
    assert found.figures["tiny/loss"] == [(0, 2.0), (1, 1.75), (2, 1.5)]
    assert math.isnan(found.figures["tiny/nan"][0][1])
    assert found.figures.keys() == {"tiny/loss", "tiny/nan"}, "a figure that is not known is left out"
    assert found.artifact == "<svg/>"
    assert not found.failed


def test_of_processes_that_train_together_the_first_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with tracked(TrackFlags("jsonl", tmp_path), "train sft"):
            pass
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(
    ("error", "failed"),
    [(ValueError("x"), True), (KeyboardInterrupt(), True), (typer.Exit(1), True), (typer.Exit(0), False)],
    ids=["error", "interrupt", "exit 1", "exit 0"],
)
def test_a_run_says_whether_it_failed(error: BaseException, failed: bool, tmp_path: Path) -> None:
    with pytest.raises(type(error)), tracked(TrackFlags("jsonl", tmp_path), "bench latency"):
        raise error
    assert read_jsonl(tmp_path).failed is failed


def test_runs_of_one_name_lie_beside_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        with tracked(TrackFlags("jsonl", tmp_path), "bench a/b"):
            pass
    assert len(list(tmp_path.glob("bench-a%2Fb-*/run.jsonl"))) == 3


def test_nothing_is_kept_unasked(tmp_path: Path) -> None:
    assert tracker("", tmp_path / "runs") is UNTRACKED
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(InvalidConfig, match=r"mlflow.*not installed; pip install 'ridgeline\[mlflow\]'"):
        tracker("mlflow", tmp_path)
    with pytest.raises(InvalidConfig, match="takes jsonl, tensorboard, mlflow, got 'wandb'"):
        tracker("wandb", tmp_path)


class Failing(Untracked):
    """A tracker whose server is gone after its run began."""

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        raise ConnectionError("the server is gone")

    close = metrics  # type: ignore[assignment]


def test_a_tracker_that_fails_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    kept = Steady(Failing())
    kept.run("train", {})
    for step in range(3):
        kept.metrics(step, {"loss": 1.0})
    kept.close(failed=False)
    assert [record.message for record in caplog.records] == [
        "the tracker of this run failed and keeps no more of it: the server is gone"
    ]


def test_a_run_that_cannot_begin_is_one_sentence() -> None:
    refusing = Untracked()
    refusing.run = refusing.metrics = None  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidConfig, match="--track cannot begin a run"):
        Steady(refusing).run("train", {})
