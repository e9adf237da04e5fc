"""Reasoning of ERNIE 4.5, behind which the answer has tags of its own:

<think>
It asks for weather.
</think>

<response>
It rains.
</response>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning.think import CLOSE, OPEN

ANSWER, ANSWER_END = "<response>", "</response>"
FORM = ReasoningForm(
    name="ernie45",
    begins=(OPEN,),
    ends=(CLOSE,),
    around=(ANSWER, ANSWER_END),
    known_by=((CLOSE, ANSWER, "<tool_call>"),),
)
