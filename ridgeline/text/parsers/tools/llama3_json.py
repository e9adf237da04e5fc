"""Tool calls in the form of Llama 3.1 and later. The whole answer is calls, after a special token or without it:

<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time", "parameters": {}}
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

OPEN = "<|python_tag|>"
BETWEEN = re.compile(r"[\s;,]*")


class Llama3JsonParser(CallParser):
    """An object is looked for where the answer begins, after the special token, and behind another call."""

    opens = Tags(OPEN)

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        read += (yield from self.expect(self.opens)) or ""
        while True:
            read += yield from self.match(BETWEEN)
            wrong = (yield from self.json_call()) if (yield from self.peek()) == "{" else ""
            if wrong is None:
                read = ""
                continue
            self.content((read if wrong or not self.calls else read.lstrip(" \n\t;,")) + wrong)
            tag = yield from self.until(self.opens, self.content)
            if tag is None:
                return
            read = tag


FORM = ToolForm(
    name="llama3_json",
    aliases=("llama4_json", "llama"),
    parser=Llama3JsonParser,
    known_by=((OPEN,), ('"parameters": dictionary of argument name',)),
    tags=(OPEN,),
    opens=(OPEN,),
    frame=Frame(call='{"name": $QUOTED, "parameters": $ARGS}', between="; "),
)
