"""Tool calls in the form of Llama 3.1 and later, after a special token or without it, or behind a sentence:

<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "time", "parameters": {}}
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

OPEN = "<|python_tag|>"
STARTS = ('{"name"', '{ "name"', '{"type"')
BETWEEN = re.compile(r"[\s;,]*")


class Llama3JsonParser(CallParser):
    """An object is looked for where the answer begins, after the special token, and behind another call. Behind other
    text it is a call if its name stands first and is that of a tool of the request."""

    opens, marks = Tags(OPEN), Tags(OPEN, *STARTS)
    free = True  # any function may be called here

    def offers(self, name: str) -> bool:
        return self.free or name in self.tools

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        read += (yield from self.expect(self.opens)) or ""
        begun = ""
        while True:
            wrong: str | None = ""
            if not begun:
                read += yield from self.match(BETWEEN)
            if begun or (yield from self.peek()) == "{":
                wrong = yield from self.json_call(begun)
            if wrong is None:
                read = begun = ""
                continue
            self.content((read if wrong or not self.calls else read.lstrip(" \n\t;,")) + wrong)
            tag = yield from self.until(self.marks, self.content)
            if tag is None:
                return
            self.free = tag == OPEN
            read, begun = (tag, "") if self.free else ("", tag)


FORM = ToolForm(
    name="llama3_json",
    aliases=("llama4_json", "llama"),
    parser=Llama3JsonParser,
    known_by=((OPEN,), ('"parameters": dictionary of argument name',)),
    tags=(OPEN,),
    opens=(OPEN,),
    frame=Frame(call='{"name": $QUOTED, "parameters": $ARGS}', between="; "),
)
