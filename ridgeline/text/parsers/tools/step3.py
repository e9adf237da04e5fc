"""Tool calls in the form of Step 3:

<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
<steptml:parameter name="city">Oslo</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>

Step 3.5 writes as Qwen3-Coder does.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.xml import XmlParser, XmlTags

OPEN, CLOSE = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"


class Step3Parser(XmlParser):
    form = XmlTags(
        open=OPEN,
        close=CLOSE,
        call=f"{CALL}function{SEPARATOR}<steptml:invoke name=",
        short=f"{CALL}<steptml:invoke name=",
        call_end=f"</steptml:invoke>{CALL_END}",
        name_end=">",
        key="<steptml:parameter name=",
        key_end=">",
        value_end="</steptml:parameter>",
    )


FORM = ToolForm(
    name="step3",
    parser=Step3Parser,
    known_by=(("<steptml:invoke",), (OPEN, CALL)),
    tags=(OPEN, CLOSE, CALL, SEPARATOR, CALL_END),
    opens=(OPEN, CALL),
    frame=Frame(
        start=OPEN,
        call=f"{CALL}function{SEPARATOR}<steptml:invoke name=$QUOTED>$ARGS</steptml:invoke>{CALL_END}",
        argument='<steptml:parameter name="$KEY">$VALUE</steptml:parameter>',
        between="",
        end=CLOSE,
    ),
)
