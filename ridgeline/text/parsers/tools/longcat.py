"""Tool calls in the form of LongCat, Hermes' within tags of its own:

<longcat_tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</longcat_tool_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.hermes import HermesParser

OPEN, CLOSE = "<longcat_tool_call>", "</longcat_tool_call>"


class LongcatParser(HermesParser):
    opened = OPEN
    opens, either = Tags(OPEN), Tags(OPEN, CLOSE)


FORM = ToolForm(
    name="longcat",
    parser=LongcatParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(call=OPEN + '\n{"name": $QUOTED, "arguments": $ARGS}\n' + CLOSE, between="\n"),
)
