"""Tool calls in the form of xLAM, where the whole answer is one list, with a fence around it or without:

[{"name": "weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

FENCES, LABEL = Tags("```", "[TOOL_CALLS]"), Tags("json")
NONE = Tags()


class XlamParser(CallParser):
    """A list is looked for where the answer begins. Objects in it are calls if they name a tool of the request."""

    skips = True

    def offers(self, name: str) -> bool:
        return not self.tools or name in self.tools

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        fence = (yield from self.expect(FENCES)) or ""
        read += fence + ((yield from self.expect(LABEL)) or "" if fence else "") + (yield from self.space())
        before, wrong = self.calls, "" if (yield from self.peek()) not in "[{" else (yield from self.json_calls())
        if wrong is not None:
            self.wrong(read, wrong, before)
        elif fence:
            yield from self.space()
            yield from self.expect(FENCES)
        yield from self.until(NONE, self.content)


FORM = ToolForm(
    name="xlam",
    parser=XlamParser,
    known_by=(("make calls in a single JSON array",),),
    frame=Frame(start="[", call='{"name": $QUOTED, "arguments": $ARGS}', between=", ", end="]"),
)
