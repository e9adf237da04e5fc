"""The sweep of the recurrent ops walks its cases on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.thorough
def test_a_dry_run_walks_every_case(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.sweep_recurrent", "--dry", "--seconds", "500"]
    command += ["--out", str(tmp_path / "lines")]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert {line["case"].split()[0] for line in lines} == {"check", "prefill", "step", "conv", "norm"}
    assert not any("error" in line for line in lines)
    assert run.stdout.splitlines()[-1].startswith("0 failed")
