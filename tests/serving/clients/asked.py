"""What the tests of clients ask for: answers that hold to a form, since the embedded model writes code, not prose."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ridgeline import LLM, SamplingParams
from tests.serving.conftest import DTYPE

PROMPT = "import numpy as"
QUESTION = "Is it raining in Oslo?"


class Weather(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid")  # the embedded model would add properties until its tokens run out
    city: Literal["Oslo", "Lima"]
    days: int = Field(ge=1, le=9)


def needs(package: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a file of tests that run a client of this name."""
    absent = find_spec(package) is None
    return [
        pytest.mark.clients,
        pytest.mark.skipif(absent, reason=f"{package} is not installed (pip install 'ridgeline[clients]')"),
    ]


def needing(package: str) -> Callable[[Any], Any]:
    """Return a decorator that gives one test or class the marks of `needs`."""

    def marked(test: Any) -> Any:
        for mark in needs(package):
            test = mark(test)
        return test

    return marked


def offline(max_tokens: int, prompt: str = PROMPT) -> str:
    """Return the offline API's greedy completion of the prompt, which every client must get too."""
    [output] = LLM(dtype=DTYPE).generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens))
    return output.outputs[0].text
