"""Reasoning of Hunyuan A13B and the dense models after it, behind which the answer has tags of its own:

<think>
It asks for weather.
</think>
<answer>
It rains.
</answer>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reasoning.think import CLOSE, OPEN

FORM = ReasoningForm(
    name="hunyuan_a13b",
    begins=(OPEN,),
    ends=(CLOSE,),
    around=("<answer>", "</answer>"),
    known_by=(),
)
