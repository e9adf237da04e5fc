"""Reasoning of DeepSeek R1, between <think> and </think>. The first of them may be missing, because the model always
reasons unless the prompt has closed it."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning.think import CLOSE, OPEN

FORM = ReasoningForm(
    name="deepseek_r1",
    aliases=("minimax_m2", "step3", "step3p5", "nemotron_v3", "granite_thinking_parser"),
    begins=(OPEN,),
    ends=(CLOSE,),
    known_by=(),
    implied=True,
)
