"""Tool calls in the form of Granite 3, a list behind a tag:

<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]

Phi-4-mini closes the list with <|/tool_call|>, or writes functools[…]. Granite 20B for functions writes one object
behind <function_call>. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

OPEN, CLOSE, SPELLED, ONE, PHI = "<|tool_call|>", "<|/tool_call|>", "<tool_call>", "<function_call>", "functools"


class GraniteParser(CallParser):
    opens, closes = Tags(OPEN, SPELLED, ONE, PHI), Tags(CLOSE)

    def parse(self) -> Reading[None]:
        while (tag := (yield from self.until(self.opens, self.content))) is not None:
            before, space = self.calls, (yield from self.space())
            listed = tag != PHI or (not space and (yield from self.peek()) == "[")
            wrong = (yield from self.json_calls()) if listed else ""
            if wrong is not None:
                self.wrong(tag + space, wrong, before)
            else:
                yield from self.space()
                yield from self.expect(self.closes)
                yield from self.space()


FORM = ToolForm(
    name="granite",
    aliases=("granite-20b-fc", "phi4_mini_json"),
    parser=GraniteParser,
    known_by=(("<|tool_call|>",),),
    tags=(OPEN, CLOSE, SPELLED, ONE),
    opens=(OPEN,),
    frame=Frame(start=OPEN + "[", call='{"name": $QUOTED, "arguments": $ARGS}', between=", ", end="]"),
)
