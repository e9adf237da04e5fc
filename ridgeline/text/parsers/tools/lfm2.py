"""Tool calls in the form of LFM2, Python's calls between two tokens. MiniCPM puts a fence around them:

<|tool_call_start|>[weather(city="Oslo", days=2), time()]<|tool_call_end|>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed
from ridgeline.text.parsers.tools.pythonic import COMMAS, PythonicParser

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
FENCE = "```"
AROUND = " \t\r\n,]"  # signs around calls, which are no content


class Lfm2Parser(PythonicParser):
    """The calls stand in a list or alone, as JSON too if the model was told so. Without the tokens a list is looked for
    where the answer begins."""

    blocks, block_ends = Tags(OPEN), Tags(CLOSE, OPEN)
    fences = Tags(FENCE + "python", FENCE + "json")

    def offers(self, name: str) -> bool:
        return self.marked or not self.tools or name in self.tools

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
            self.marked = True
            tag = yield from self._block()
            if tag != OPEN:
                tag = yield from self.until(self.blocks, self.content)

    def _block(self) -> Reading[str | None]:
        """Read on from a block's first token to its last, and return the tag there."""
        before, read = self.calls, (yield from self.space())
        fence = (yield from self.expect(self.fences)) or ""
        read += fence + (yield from self.space())
        wrong = yield from self._calls()
        if self.calls == before:
            self.content(OPEN + read + (wrong or ""))
            tag = yield from self.until(self.block_ends, self.content)
            self.content(CLOSE if tag == CLOSE else "")
            return tag
        give = Trimmed(self.content, AROUND + ("`" if fence else ""))
        give(wrong or "")
        tag = yield from self.until(self.block_ends, give)
        if tag is None:
            give.give_held()
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
