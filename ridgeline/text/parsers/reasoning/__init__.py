"""The forms in which models set their reasoning apart, one file for each. They are looked for in a template in this
order."""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning import (
    apertus,
    cohere,
    deepseek_r1,
    ernie45,
    gemma4,
    granite,
    harmony,
    hunyuan,
    minimax_m3,
    mistral,
    qwen3,
    seed_oss,
    think,
)

REASONING_FORMS: tuple[ReasoningForm, ...] = (
    harmony.FORM,
    gemma4.FORM,
    cohere.FORM,
    apertus.FORM,
    minimax_m3.FORM,
    mistral.FORM,
    granite.FORM,
    seed_oss.FORM,
    ernie45.FORM,
    hunyuan.FORM,
    think.FORM,
    deepseek_r1.FORM,
    qwen3.FORM,
)
