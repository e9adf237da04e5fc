"""Tool calls in the form of GLM 4.5 and later:

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.xml import XmlParser, XmlTags


class GlmParser(XmlParser):
    form = XmlTags(
        open="<tool_call>",
        close="</tool_call>",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
    )


FORM = ToolForm(
    name="glm45",
    aliases=("glm47",),
    parser=GlmParser,
    known_by=(("<arg_key>", "<arg_value>"),),
    tags=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    opens=("<tool_call>",),
    frame=Frame(
        call="<tool_call>$NAME\n$ARGS</tool_call>",
        argument="<arg_key>$KEY</arg_key>\n<arg_value>$VALUE</arg_value>\n",
    ),
)
