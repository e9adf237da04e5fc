"""Tool calls in the form of xLAM, a list with a fence around it or without, which may stand behind a sentence:

[{"name": "weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

FENCES, LABEL = Tags("```", "[TOOL_CALLS]"), Tags("json")
FENCE, LIST, NAMED = "```", "[", Tags('{"name"', '{ "name"')
MARKS, FENCE_END = Tags(FENCE, LIST), Tags(FENCE)


class XlamParser(CallParser):
    """Objects in a list are calls if they name a tool of the request. Where the answer begins an object may stand
    alone, and behind other text the first object of a list has its name first."""

    skips = True

    def offers(self, name: str) -> bool:
        return not self.tools or name in self.tools

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        yield from self._calls(read, (yield from self.expect(FENCES)) or "", alone=True)
        while (tag := (yield from self.until(MARKS, self.content))) is not None:
            if tag == FENCE:
                yield from self._calls("", tag)
            elif not (yield from self.follows(NAMED)):
                self.content(tag)
            elif (wrong := (yield from self.json_list())) is not None:
                self.content(wrong)

    def _calls(self, read: str, fence: str, alone: bool = False) -> Reading[None]:
        """Read calls behind `read` and the fence, which are content if no call comes. alone: one may be no list."""
        read += fence
        if fence:
            read += ((yield from self.expect(LABEL)) or "") + (yield from self.space())
        before = self.calls
        wrong: str | None = ""
        if (yield from self.peek()) in ("[{" if alone else "["):
            wrong = yield from self.json_calls()
        if wrong is not None:
            self.wrong(read, wrong, before)
        elif fence:
            yield from self.space()
            yield from self.expect(FENCE_END)


FORM = ToolForm(
    name="xlam",
    parser=XlamParser,
    known_by=(("make calls in a single JSON array",),),
    frame=Frame(start="[", call='{"name": $QUOTED, "arguments": $ARGS}', between=", ", end="]"),
)
