"""Reasoning of Seed-OSS, between two tags of its own."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm

FORM = ReasoningForm(name="seed_oss", begins=("<seed:think>",), ends=("</seed:think>",), known_by=(("<seed:think>",),))
