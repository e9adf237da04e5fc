"""Tool calls in the form of Seed-OSS, Qwen3-Coder's within tags of its own:

<seed:tool_call>
<function=weather>
<parameter=city>Oslo</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.tools.qwen3_coder import QwenCoderParser
from ridgeline.text.parsers.xml import XmlParser

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"


class SeedParser(XmlParser):
    form = replace(QwenCoderParser.form, open=OPEN, close=CLOSE)


FORM = ToolForm(
    name="seed_oss",
    parser=SeedParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(
        call=f"{OPEN}\n<function=$NAME>\n$ARGS</function>\n{CLOSE}",
        argument="<parameter=$KEY>$VALUE</parameter>\n",
    ),
)
