"""Tool calls in SmolLM3's form of code, Python's calls on lines of their own:

<code>
weather(city="Oslo", days=2)
</code>

The model writes so for tools that its template is given as `python_tools`. For tools as requests have them it writes
as Hermes does, so this form is chosen by its name only.
"""

from __future__ import annotations

from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Tags
from ridgeline.text.parsers.tools.olmo3 import Olmo3Parser

OPEN, CLOSE = "<code>", "</code>"


class SmolLM3Parser(Olmo3Parser):
    opened = OPEN
    blocks, block_ends = Tags(OPEN), Tags(CLOSE)


FORM = ToolForm(
    name="smollm3",
    parser=SmolLM3Parser,
    known_by=(),
    tags=(OPEN, CLOSE),
    frame=Frame(
        start=OPEN + "\n",
        call="$NAME($ARGS)",
        argument="$KEY=$VALUE",
        separator=", ",
        python=True,
        end="\n" + CLOSE,
    ),
)
