"""The forms in which models set their reasoning apart, one file for each. They are looked for in a template in this
order."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning import deepseek_r1, gemma4, granite, harmony, mistral, seed_oss, think

REASONING_FORMS: tuple[ReasoningForm, ...] = (
    harmony.FORM,
    gemma4.FORM,
    mistral.FORM,
    granite.FORM,
    seed_oss.FORM,
    think.FORM,
    deepseek_r1.FORM,
)
