"""Reasoning of gpt-oss: the channel "analysis". The answer begins in the channel "final".

`HarmonyParser` reads it together with the calls.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.tools.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

FORM = ReasoningForm(
    name="openai_gptoss",
    aliases=("gpt_oss", "openai", "harmony"),
    begins=(),
    ends=(f"{CHANNEL}final{MESSAGE}", f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}"),
    before_end=f"{END}{START}assistant",
    opening=f"{CHANNEL}analysis{MESSAGE}",
    call_ends=(END,),
    known_by=((START, CHANNEL, MESSAGE),),
    channels=True,
)
