"""Adapters of the tokens' table and of the output layer on several ranks, beside PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("peft")

from tests.peft_adapters import PeftAdapter
from tests.ranks.test_adapters import RANKS, STAGES
from tests.test_lora import compare
from tests.test_lora_vocabulary import FAMILIES, TABLES, adapters_of

pytestmark = pytest.mark.usefixtures("forked_ranks")

TinyModel = Callable[[str], Path]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("llama", RANKS), ("gemma2", RANKS), ("gemma2", STAGES)],
    ids=["two tables", "one table", "stages"],
)
def test_tables_of_ranks_are_those_of_peft(
    family: str, ranks: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Products, whole tables, and rows of tokens of either rank's part."""
    layer, table, head = FAMILIES[family]
    adapters = [
        adapters_of(family, tmp_path)[0],
        PeftAdapter(family, tmp_path / "whole", seed=1, modules_to_save=[table, head], target_modules=[layer]),
        PeftAdapter(family, tmp_path / "rows", seed=2, trainable_token_indices=[7, 300, 11], target_modules=[layer]),
    ]
    compare(family, tiny_model(family), adapters, **TABLES, **ranks)
