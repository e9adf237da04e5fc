"""The folders of tiny vision-language models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.vision import tiny


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_vision(family)`: the folder of that family's tiny model. Do not write to it."""

    @cache
    def folder(family: str) -> Path:
        return tiny.save(family, tmp_path_factory.mktemp(family))

    return folder
