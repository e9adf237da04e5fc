"""Reasoning of Gemma 4, a channel of its own:

<|channel>thought
It asks for weather.<channel|>It rains.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(
    name="gemma4",
    begins=("<|channel>",),
    label="thought",
    ends=("<channel|>",),
    known_by=(("<|channel>thought",), ("<|channel>", "<channel|>")),
)
