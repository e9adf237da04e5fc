"""Reasoning of Cohere's Command A Reasoning and later, between two tokens."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(
    name="cohere_command3",
    aliases=("cohere_command4",),
    begins=("<|START_THINKING|>",),
    ends=("<|END_THINKING|>",),
    known_by=(("<|START_THINKING|>",),),
)
