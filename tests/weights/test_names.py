"""The names by which quantization configs mean modules."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.quantized.names import among, pattern

NAME = "model.layers.0.mlp.experts.12.gate_proj"


@pytest.mark.parametrize(
    "text",
    [
        *(r"((\w|\.)+)+!", r"(a|a)*b", r"(?:\w+\.)+x", r"(.*a){3,9}", ".*" * 6, "(" + r"\d?" * 600 + ")"),
    ],
)
def test_a_pattern_that_may_take_without_end_is_refused(text: str) -> None:
    with pytest.raises(ModelLoadError, match="too many ways"):
        pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        r".*self_attn.*",
        r"^model\.layers\.\d+\.mlp\.(gate|up|down)_proj$",
        r".*experts\.\d+\.(?:gate_proj|up_proj)",
        "lm_?head",
    ],
)
def test_patterns_of_published_configs_are_taken(text: str) -> None:
    assert pattern(text).pattern == text


def test_many_stars_take_little_time() -> None:
    start = time.process_time()
    assert not among(NAME * 3, ["********!", "*a*b*c*d*e*f*g*h*i*j*k*!"] * 20)
    assert time.process_time() - start < 1


@given(st.text("ab.", max_size=8), st.text("ab.*", min_size=1, max_size=6).filter(lambda text: "*" in text))
def test_stars_are_any_text(name: str, glob: str) -> None:
    expected = re.fullmatch(rf"{re.escape(glob).replace(chr(92) + '*', '.*')}(\..*)?", name) is not None
    assert among(name, [glob]) == expected
