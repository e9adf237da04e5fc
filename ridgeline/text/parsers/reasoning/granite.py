"""Reasoning of Granite 3.2, between two sentences."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(
    name="granite",
    begins=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
    known_by=(("Here is my thought process",), ("Here's my thought process",)),
)
