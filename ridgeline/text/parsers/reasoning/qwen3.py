"""Reasoning of Qwen3 and Qwen3.5 as vLLM's parser of that name reads it: an answer begins with reasoning, with its tag
or without, unless the prompt has closed it or the request turns it off."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning.think import CLOSE, OPEN

FORM = ReasoningForm(
    name="qwen3",
    begins=(OPEN,),
    ends=(CLOSE,),
    known_by=(),
    implied=True,
    switch="enable_thinking",
)
