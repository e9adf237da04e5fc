"""Tool calls in the form of Cohere's Command models, a list between two tags:

<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}
]<|END_ACTION|>
"""

from __future__ import annotations

import re
from typing import Any

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.minimax import MinimaxParser

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
TEXT = r'"(?:[^"\\<]|\\[^<])*"'


class CohereParser(MinimaxParser):
    """The ids only count the calls of an answer, so calls get others."""

    opened = OPEN
    opens, closes = Tags(OPEN), Tags(CLOSE)
    head = re.compile(
        rf'\{{\s*(?:"tool_call_id"\s*:\s*{TEXT}\s*,\s*)?"tool_name"\s*:\s*({TEXT})\s*,\s*"parameters"\s*:\s*'
    )

    def parts(self, call: dict[str, Any]) -> tuple[object, object]:
        return call.get("tool_name"), call.get("parameters", {})


FORM = ToolForm(
    name="cohere_command3",
    aliases=("cohere_command4", "cohere2"),
    parser=CohereParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(
        start=OPEN + "[\n",
        call='    {"tool_call_id": "$INDEX", "tool_name": $QUOTED, "parameters": $ARGS}',
        between=",\n",
        end="\n]" + CLOSE,
    ),
)
