"""Every kernel listed for it compiles without a GPU, for each architecture, and uses the machine as it claims.

The compiler runs in a process of its own: in this one kernels may be interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ridgeline.kernels.aot import ARCHS, AotKernel, build

pytest.importorskip("triton")

Reports = list[dict[str, Any]]


@pytest.fixture(scope="session")
def reports() -> Reports:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "ridgeline.kernels.aot", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(reports: Reports, arch: str) -> None:
    ours = [report for report in reports if report["arch"] == arch]
    assert ours
    assert {report["kernel"]: report["error"] for report in ours if report["error"]} == {}


def test_hot_kernels_keep_everything_in_registers(reports: Reports) -> None:
    hot = [report for report in reports if report["hot"] and report["arch"] == "sm_90"]
    assert hot
    assert {report["kernel"]: report["spilled"] for report in hot if report["spilled"]} == {}


def test_matrix_products_run_on_tensor_cores(reports: Reports) -> None:
    for report in reports:
        if report["tensor_cores"] and not report["error"]:
            expected = report["tensor_cores"] if report["arch"] == "sm_90" else ""
            found = report["instructions"]
            assert found.get(expected) if expected else found, (report["kernel"], report["arch"], found)


def test_the_list_is_short_and_says_nothing_twice(reports: Reports) -> None:
    entries = [(report["kernel"], report["arch"]) for report in reports]
    assert len(set(entries)) == len(entries)
    assert len(entries) <= 150


def test_an_argument_without_a_type_is_named() -> None:
    class Kernel:
        arg_names = ("x_ptr", "n", "BLOCK")
        __name__ = "kernel"

    with pytest.raises(ValueError, match=r"\['n'\].*\['m'\]"):
        build(AotKernel(Kernel(), {"x_ptr": "*fp32", "m": "i32"}, {"BLOCK": 4}), "sm_90")
