"""Tool calls in the form of Nemotron Nano 2, a list between two tags:

<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>

Nemotron 3 writes as Qwen3-Coder does.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.minimax import MinimaxParser

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"


class NemotronParser(MinimaxParser):
    opened = OPEN
    opens, closes = Tags(OPEN), Tags(CLOSE)


FORM = ToolForm(
    name="nemotron_v2",
    aliases=("nemotron_json",),
    parser=NemotronParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(start=OPEN + "[", call='{"name": $QUOTED, "arguments": $ARGS}', between=", ", end="]" + CLOSE),
)
