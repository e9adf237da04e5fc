"""Tool calls in the form of MiniMax M2:

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.xml import XmlParser, XmlTags


class MinimaxM2Parser(XmlParser):
    form = XmlTags(
        open="<minimax:tool_call>",
        close="</minimax:tool_call>",
        call="<invoke name=",
        call_end="</invoke>",
        name_end=">",
        key="<parameter name=",
        key_end=">",
        value_end="</parameter>",
    )


FORM = ToolForm(
    name="minimax_m2",
    parser=MinimaxM2Parser,
    known_by=(("<minimax:tool_call>",),),
    tags=("<minimax:tool_call>", "</minimax:tool_call>"),
    opens=("<minimax:tool_call>",),
    frame=Frame(
        start="<minimax:tool_call>\n",
        call="<invoke name=$QUOTED>\n$ARGS</invoke>\n",
        argument='<parameter name="$KEY">$VALUE</parameter>\n',
        between="",
        end="</minimax:tool_call>",
    ),
)
