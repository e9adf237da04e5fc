"""Tool calls in the form of FunctionGemma, Gemma 4's with tags of its own:

<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import ToolForm
from ridgeline.text.parsers.tools.gemma4 import Gemma4Parser

OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


class FunctionGemmaParser(Gemma4Parser):
    opened, closed, quote = OPEN, CLOSE, QUOTE


FORM = ToolForm(
    name="functiongemma",
    parser=FunctionGemmaParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE, QUOTE),
    opens=(OPEN,),
)
