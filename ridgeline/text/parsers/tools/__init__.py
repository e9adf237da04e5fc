"""The forms in which models write tool calls, one file for each.

They are looked for in a template in this order, from those that nothing else is like to the most common one.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.tools import (
    apertus,
    cohere,
    deepseek,
    dsml,
    functiongemma,
    gemma4,
    glm45,
    granite,
    harmony,
    hermes,
    internlm,
    kimi_k2,
    lfm2,
    llama3_json,
    longcat,
    minimax,
    minimax_m2,
    minimax_m3,
    mistral,
    nemotron,
    olmo3,
    pythonic,
    qwen3_coder,
    seed_oss,
    smollm3,
    step3,
    xlam,
)

TOOL_FORMS: tuple[ToolForm, ...] = (
    harmony.FORM,
    gemma4.FORM,
    functiongemma.FORM,
    cohere.FORM,
    apertus.FORM,
    internlm.FORM,
    step3.FORM,
    kimi_k2.FORM,
    dsml.V4,
    dsml.V32,
    deepseek.V3,
    deepseek.V31,
    minimax_m2.FORM,
    minimax_m3.FORM,
    glm45.FORM,
    qwen3_coder.FORM,
    seed_oss.FORM,
    lfm2.FORM,
    mistral.FORM,
    granite.FORM,
    olmo3.FORM,
    minimax.FORM,
    nemotron.FORM,
    longcat.FORM,
    smollm3.FORM,
    xlam.FORM,
    pythonic.FORM,
    llama3_json.FORM,
    hermes.FORM,
)
