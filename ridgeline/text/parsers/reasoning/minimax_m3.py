"""Reasoning of MiniMax M3, between two tags of its own."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(
    name="minimax_m3",
    begins=("<mm:think>",),
    ends=("</mm:think>",),
    known_by=(("<mm:think>",),),
)
