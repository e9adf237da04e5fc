"""Fixtures every test folder shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any is imported

from tests import tiny_models

if find_spec("msgspec") is None or find_spec("zmq") is None:  # without the server's packages the engine is tested alone
    collect_ignore = ["serving", "deploy", "bench/test_serving_load.py"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model(family)`: the folder of that family's tiny model (see tests/tiny_models.py). Do not write to it."""

    @cache
    def folder(family: str) -> Path:
        return tiny_models.save(family, tmp_path_factory.mktemp(family))

    return folder
