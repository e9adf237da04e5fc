"""The pipeline for Kubeflow: run for real, on this machine and on the embedded model, and the compiled file beside it.
RIDGELINE_TEST_KFP names a Python with `kfp` and `kfp-kubernetes`; without it, it is the Python that runs the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.deploy.test_platforms import KSERVE, WORKERS

FOLDER = Path(__file__).parents[2] / "deploy" / "kubeflow"
PIPELINE, PLATFORM = yaml.safe_load_all((FOLDER / "pipeline.yaml").read_text())
TASKS = PIPELINE["root"]["dag"]["tasks"]
EXECUTORS = PIPELINE["deploymentSpec"]["executors"]
PYTHON = os.environ.get("RIDGELINE_TEST_KFP", sys.executable)
needs_kfp = pytest.mark.skipif(
    "RIDGELINE_TEST_KFP" not in os.environ and importlib.util.find_spec("kfp") is None, reason="needs kfp"
)
# Runs the pipeline by kfp's own runner, each step in a process; prints the metrics of each.
RUN = """
import json, sys
from kfp import local
sys.path.insert(0, sys.argv[1])
import pipeline
local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])
pipeline.quantize_and_check(**json.loads(sys.argv[3]))
"""


def container(name: str) -> dict[str, Any]:
    return dict(EXECUTORS[f"exec-{name}"]["container"])


def run(folder: Path, **arguments: Any) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, float]]]:
    """Run the pipeline. Returns the metrics of the steps that ended."""
    command = folder / "ridgeline"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ridgeline "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    whole = [PYTHON, "-c", RUN, str(FOLDER), str(folder / "root"), json.dumps(arguments)]
    done = subprocess.run(whole, capture_output=True, text=True, env=environment, timeout=900, check=False)
    found = {}
    for file in (folder / "root").glob("*/*/executor_output.json"):
        [metrics] = json.loads(file.read_text())["artifacts"].get("metrics", {"artifacts": [{}]})["artifacts"]
        found[file.parent.name] = metrics.get("metadata", {})
    return done, found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.py"
    file.write_text(Path(re.__file__).read_text()[:6000])
    return file


@needs_kfp
def test_the_embedded_model_is_quantized_compared_and_served(tmp_path: Path, text: Path) -> None:
    settings = {"model": str(EMBEDDED_MODEL), "scheme": "w8a16", "method": "rtn", "text": str(text)}
    done, metrics = run(tmp_path, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert metrics.keys() == TASKS.keys() == {"download", "quantize", "evaluate", "serve-check"}
    told = metrics["evaluate"]
    assert told["loss"] == pytest.approx(told["perplexity_after"] / told["perplexity_before"] - 1)
    assert abs(told["loss"]) < 0.02
    assert 0 < told["kl_mean"] < 0.02
    assert 0.9 < told["equal_greedy"] <= 1
    assert metrics["serve-check"]["tokens_per_second"] > 0
    [quantized] = (tmp_path / "root").glob("*/quantize/quantized")
    assert "quantization_config" in json.loads((quantized / "config.json").read_text())


@needs_kfp
def test_a_loss_that_is_too_high_ends_the_run_before_it_is_served(tmp_path: Path, text: Path) -> None:
    done, metrics = run(
        tmp_path, model=str(EMBEDDED_MODEL), scheme="w2a16", method="rtn", text=str(text), most_loss=0.01
    )
    assert done.returncode != 0
    assert "and may grow by 1.0%" in done.stdout + done.stderr
    assert "serve-check" not in metrics


@needs_kfp
def test_the_compiled_file_is_that_of_the_program(tmp_path: Path) -> None:
    """All but the version of the compiler. kfp reads it back, too, which checks it by the message that servers take."""
    made = tmp_path / "pipeline.yaml"
    subprocess.run([PYTHON, str(FOLDER / "pipeline.py"), str(made)], check=True, timeout=120)
    again, platform = yaml.safe_load_all(made.read_text())
    assert {**again, "sdkVersion": ""} == {**PIPELINE, "sdkVersion": ""}
    assert platform == PLATFORM
    check = f"from kfp import components; components.load_component_from_file({str(FOLDER / 'pipeline.yaml')!r})"
    subprocess.run([PYTHON, "-c", check], check=True, timeout=120)


def test_steps_run_in_order_and_those_that_compute_have_a_gpu() -> None:
    after = {name: set(task.get("dependentTasks", ())) for name, task in TASKS.items()}
    assert after == {
        "download": set(),
        "quantize": {"download"},
        "evaluate": {"download", "quantize"},
        "serve-check": {"evaluate", "quantize"},
    }
    for name in TASKS:
        accelerator = container(name)["resources"].get("accelerator", {})
        scheduled = PLATFORM["platforms"]["kubernetes"]["deploymentSpec"]["executors"].get(f"exec-{name}")
        if name == "download":
            assert not accelerator
            assert scheduled is None
            continue
        assert (accelerator["resourceType"], accelerator["resourceCount"]) == ("nvidia.com/gpu", "1")
        assert scheduled is not None
        assert scheduled["nodeSelector"]["labels"] == KSERVE["spec"]["predictor"]["nodeSelector"]
        [toleration] = scheduled["tolerations"]
        assert toleration in WORKERS["template"]["spec"]["tolerations"]


def test_the_image_has_the_compilers_version_and_no_step_installs_anything() -> None:
    [version] = re.findall(r"kfp==([\d.]+)$", (FOLDER / "Dockerfile").read_text(), re.M)
    assert PIPELINE["sdkVersion"] == f"kfp-{version}"
    for name in TASKS:
        assert container(name)["image"] == "ridgeline-kfp:latest"
        assert "pip install" not in " ".join(container(name)["command"])
