"""Tool calls in the form of Olmo 3, Python's calls on lines of their own:

<function_calls>
weather(city="Oslo", days=2)
</function_calls>
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Give, Reading, Tags, Trimmed
from ridgeline.text.parsers.tools.pythonic import PythonicParser

OPEN, CLOSE = "<function_calls>", "</function_calls>"


class Olmo3Parser(PythonicParser):
    opened = OPEN
    blocks, block_ends = Tags(OPEN), Tags(CLOSE)

    def parse(self) -> Reading[None]:
        while (yield from self.until(self.blocks, self.content)):
            before, wrong = self.calls, (yield from self.python_calls())
            called = self.calls > before
            give: Give = self.content if wrong or not called else Trimmed(self.content)
            give(("" if called else self.opened) + (wrong or ""))
            tag = yield from self.until(self.block_ends, give)
            if called:
                yield from self.space()
            else:
                self.content(tag or "")


FORM = ToolForm(
    name="olmo3",
    parser=Olmo3Parser,
    known_by=((OPEN,),),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(
        start="<function_calls>\n",
        call="$NAME($ARGS)",
        argument="$KEY=$VALUE",
        separator=", ",
        python=True,
        end="\n</function_calls>",
    ),
)
