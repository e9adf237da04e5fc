"""The kernels' package works without the engine: copied alone, every module of it is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline.kernels

IMPORTS = """
import importlib, pkgutil, sys
import ridgeline.kernels
from ridgeline.kernels.ops import Ops
names = [info.name for info in pkgutil.walk_packages(ridgeline.kernels.__path__, "ridgeline.kernels.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # Gluon's names are of GPUs' machines
        if str(error.name).startswith("ridgeline"):
            raise
print(len(names), *sorted(name for name in sys.modules if name.startswith("ridgeline.") and ".kernels" not in name))
"""


@pytest.mark.dealt
def test_kernels_are_imported_without_the_engine(tmp_path: Path) -> None:
    source = Path(ridgeline.kernels.__file__).parent
    shutil.copytree(source, tmp_path / "ridgeline" / "kernels")  # with what Python has compiled: that takes seconds
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-P", "-c", IMPORTS]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count, *others = done.stdout.split()
    assert int(count) > 200
    assert others == []
