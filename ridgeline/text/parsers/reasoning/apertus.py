"""Reasoning of Apertus, between two tokens."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(
    name="apertus",
    begins=("<|inner_prefix|>",),
    ends=("<|inner_suffix|>",),
    known_by=(("<|inner_prefix|>",),),
)
