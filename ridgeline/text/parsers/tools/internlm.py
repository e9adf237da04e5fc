"""Tool calls in the form of InternLM 2 and later, one object between tags:

<|action_start|><|plugin|>
{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.granite import GraniteParser

START, PLUGIN, CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternParser(GraniteParser):
    opens, closes = Tags(START + PLUGIN), Tags(CLOSE)


FORM = ToolForm(
    name="internlm",
    parser=InternParser,
    known_by=((START, PLUGIN),),
    tags=(START, PLUGIN, CLOSE),
    opens=(START,),
    frame=Frame(call=f'{START}{PLUGIN}\n{{"name": $QUOTED, "parameters": $ARGS}}{CLOSE}', between="\n"),
)
