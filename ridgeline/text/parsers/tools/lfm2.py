"""Tool calls in the form of LFM2, Python's calls between two tokens. MiniCPM puts a fence around them:

<|tool_call_start|>[weather(city="Oslo", days=2), time()]<|tool_call_end|>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags
from ridgeline.text.parsers.tools.pythonic import COMMAS, PythonicParser

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
FENCE = "```"


class Lfm2Parser(PythonicParser):
    """The calls stand in a list or alone, as JSON too if the model was told so. Without the tokens a list is looked for
    where the answer begins."""

    blocks, block_ends = Tags(OPEN), Tags(CLOSE, OPEN)
    fences = Tags(FENCE + "python", FENCE + "json")

    def parse(self) -> Reading[None]:
        read = yield from self.space()
        if (yield from self.peek()) == "[":
            wrong = yield from self._calls()
            if wrong is not None:
                self.content(wrong if self.calls else read + wrong)
        else:
            self.content(read)
        tag = yield from self.until(self.blocks, self.content)
        while tag is not None:
            tag = yield from self._block()
            if tag != OPEN:
                tag = yield from self.until(self.blocks, self.content)

    def _block(self) -> Reading[str | None]:
        """Read on from a block's first token to its last, and return the tag there."""
        before, read = self.calls, (yield from self.space())
        read += (yield from self.expect(self.fences)) or ""
        read += yield from self.space()
        wrong = yield from self._calls()
        rest, tag = yield from self.taken(self.block_ends)
        closed = tag if tag == CLOSE else ""
        if wrong is not None:
            head = "" if self.calls > before else read
            self.wrong(OPEN, head + wrong + rest + closed, before)
        elif tag == CLOSE:
            yield from self.space()
        return tag

    def _calls(self) -> Reading[str | None]:
        """Read calls in a list or alone. Return None, or the text of what is none."""
        before, bracket = self.calls, (yield from self.expect(self.opens)) or ""
        read = bracket + (yield from self.space())
        if (yield from self.peek()) == "{":
            wrong = yield from self.json_call()
            while wrong is None and (yield from self._another()):
                wrong = yield from self.json_call()
        else:
            wrong = yield from self.python_calls()
        if wrong is not None:
            return wrong if self.calls > before else read + wrong
        yield from self.space()
        yield from self.expect(self.closes)
        return None

    def _another(self) -> Reading[bool]:
        """Return True if a further object comes behind a comma."""
        yield from self.match(COMMAS)
        return (yield from self.peek()) == "{"


FORM = ToolForm(
    name="lfm2",
    aliases=("minicpm", "lfm2.5"),
    parser=Lfm2Parser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(
        start=OPEN + "[",
        call="$NAME($ARGS)",
        argument="$KEY=$VALUE",
        separator=", ",
        python=True,
        between=", ",
        end="]" + CLOSE,
    ),
)
