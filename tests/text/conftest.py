"""Fixtures of the text tests: a folder and a tokenizer of each family."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.text.tokenizer import Tokenizer
from tests.text.sample_tokenizers import FAMILIES, write_folder


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_folder(root / name, make()) for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def tokenizer(folders: dict[str, Path], family: str) -> Tokenizer:
    return Tokenizer.from_folder(folders[family])


@pytest.fixture(scope="session")
def byte_level_tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_folder(folders["byte_level"])


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_folder(folders["byte_fallback"])
