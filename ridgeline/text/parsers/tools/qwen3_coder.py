"""Tool calls in the form of Qwen3-Coder:

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.xml import XmlParser, XmlTags


class QwenCoderParser(XmlParser):
    form = XmlTags(
        open="<tool_call>",
        close="</tool_call>",
        call="<function=",
        call_end="</function>",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        line=True,
    )


FORM = ToolForm(
    name="qwen3_coder",
    aliases=("qwen3_xml", "step3p5", "mimo"),
    parser=QwenCoderParser,
    known_by=(("<tool_call>", "<function=", "<parameter="),),  # Seed-OSS has the last two within tags of its own
    tags=("<tool_call>", "</tool_call>"),
    opens=("<tool_call>",),
    frame=Frame(
        call="<tool_call>\n<function=$NAME>\n$ARGS</function>\n</tool_call>",
        argument="<parameter=$KEY>\n$VALUE\n</parameter>\n",
    ),
)
