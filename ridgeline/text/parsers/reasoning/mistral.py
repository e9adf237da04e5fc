"""Reasoning of Magistral and later models, between two special tokens."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(name="mistral", begins=("[THINK]",), ends=("[/THINK]",), known_by=(("[THINK]",),))
