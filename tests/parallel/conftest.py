"""Answers of one device, which models over several must give too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.driving import Outcome, rig


@pytest.fixture(scope="session")
def one_device(tiny_model: Callable[[str], Path]) -> Callable[[str], dict[str, Outcome]]:
    """Returns what becomes of `test_covering_design.asked` for a family's tiny model."""
    from tests.parallel.test_covering_design import asked  # here, since it is skipped where a package is missing

    @cache
    def outcomes(family: str) -> dict[str, Outcome]:
        with rig(tiny_model(family)) as one:
            return one.run(*asked())

    return outcomes
