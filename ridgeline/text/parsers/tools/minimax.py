"""Tool calls in the form of MiniMax M1, one on each line:

<tool_calls>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_calls>

Hunyuan A13B, Jamba and Apriel write one list there, which is read too.
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Give, Reading, Tags, Trimmed

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"
BETWEEN = re.compile(r"[\s,\[\]]*")


class MinimaxParser(CallParser):
    opened = OPEN
    opens, closes = Tags(OPEN), Tags(CLOSE)

    def parse(self) -> Reading[None]:
        while (yield from self.until(self.opens, self.content)):
            before, read = self.calls, self.opened
            while True:
                read += yield from self.match(BETWEEN)
                wrong = (yield from self.json_call()) if (yield from self.peek()) == "{" else ""
                if wrong is None:
                    read = ""
                    continue
                called = self.calls > before
                give: Give = self.content if wrong or not called else Trimmed(self.content)
                give(wrong if called else read + wrong)
                tag = yield from self.until(self.closes, give)
                if called:
                    yield from self.space()
                else:
                    self.content(tag or "")
                break


FORM = ToolForm(
    name="minimax",
    aliases=("minimax_m1", "hunyuan_a13b", "jamba"),
    parser=MinimaxParser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(start=OPEN + "\n", call='{"name": $QUOTED, "arguments": $ARGS}', between="\n", end="\n" + CLOSE),
)
