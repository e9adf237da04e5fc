"""The forms in which models write tool calls, one file for each.

They are looked for in a template in this order, from those that nothing else is like to the most common one.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.tools import (
    deepseek,
    glm45,
    granite,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    minimax,
    minimax_m2,
    mistral,
    olmo3,
    pythonic,
    qwen3_coder,
)

TOOL_FORMS: tuple[ToolForm, ...] = (
    harmony.FORM,
    kimi_k2.FORM,
    deepseek.V3,
    deepseek.V31,
    minimax_m2.FORM,
    glm45.FORM,
    qwen3_coder.FORM,
    mistral.FORM,
    granite.FORM,
    olmo3.FORM,
    minimax.FORM,
    pythonic.FORM,
    llama3_json.FORM,
    hermes.FORM,
)
