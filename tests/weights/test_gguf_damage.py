"""A GGUF file whose values are damaged is a model that can be built, or one clear sentence, at once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.weights.formats.gguf_file import GGUF, read_gguf
from ridgeline.weights.gguf.config import DIALECTS, gguf_config
from ridgeline.weights.gguf.names import gguf_weights
from tests import gguf_near
from tests.weights.test_gguf import written

pytest.importorskip("gguf")

MISSING = object()
WRONG = (MISSING, 0, -1, 1, 2**40, 2**63, 1e30, float("nan"), float("inf"), True, "x", "", [], [0], [2**40], ["x"])
SECONDS = 5.0  # of any one file; most take some milliseconds
ONE_EACH = {written.architecture: family for family, written in gguf_near.FAMILIES.items()}


def changed(gguf: GGUF, name: str, value: Any) -> GGUF:
    values = {key: each for key, each in gguf.values.items() if key != name}
    return replace(gguf, values=values if value is MISSING else {**values, name: value})


@pytest.mark.parametrize("architecture", ONE_EACH)
def test_every_value_may_be_missing_absurd_or_of_another_type(architecture: str, tmp_path: Path) -> None:
    gguf = read_gguf(written(ONE_EACH[architecture], tmp_path))
    names = [name for name in gguf.values if name.startswith(f"{architecture}.")]
    read = model_config(gguf_config(gguf))
    assert gguf_weights(gguf, read.weights, read.spec)
    said = []
    for name in names:
        for value in WRONG:
            start = time.perf_counter()
            said.append(refusal(changed(gguf, name, value)))
            assert time.perf_counter() - start < SECONDS, (name, value)
    sentences = [each for each in said if each]
    assert len(sentences) > 3 * len(names)
    assert all("\n" not in each and len(each) < 1000 for each in sentences)


def refusal(gguf: GGUF) -> str:
    """The sentence with which a file is refused; "" if it describes a model."""
    try:
        found = model_config(gguf_config(gguf))
        gguf_weights(gguf, found.weights, found.spec)
    except ModelLoadError as error:
        return str(error)
    return ""


def test_an_architecture_that_we_do_not_know_is_named_with_those_we_do(tmp_path: Path) -> None:
    gguf = changed(read_gguf(written("arcee", tmp_path)), "general.architecture", "plamo3")
    with pytest.raises(ModelLoadError, match=r"holds the architecture 'plamo3'; as GGUF we read .*arcee, .*seed_oss"):
        gguf_config(gguf)
    assert set(ONE_EACH) <= set(DIALECTS)
