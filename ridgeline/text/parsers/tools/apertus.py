"""Tool calls in the form of Apertus, a list of objects with the name as their only key:

<|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>
"""

from __future__ import annotations

import re
from typing import Any

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.minimax import MinimaxParser

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusParser(MinimaxParser):
    opened = OPEN
    opens, closes = Tags(OPEN), Tags(CLOSE)
    head = re.compile(r'\{\s*("(?:[^"\\<]|\\[^<])*")\s*:\s*')

    def parts(self, call: dict[str, Any]) -> tuple[object, object]:
        [*pairs] = call.items()
        return pairs[0] if len(pairs) == 1 and not isinstance(pairs[0][1], str) else (None, None)


FORM = ToolForm(
    name="apertus",
    parser=ApertusParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(start=OPEN + "[", call="{$QUOTED: $ARGS}", between=", ", end="]" + CLOSE),
)
