"""Tool calls in Mistral's forms. The first one is that of the older tokenizers, and the others followed one another:

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]time{}
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import random
import re
import string

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
WORD = re.compile(r"[\w.\-]*")


class MistralParser(CallParser):
    opens, marks, ids = Tags(OPEN), Tags(ID, ARGUMENTS), Tags(ARGUMENTS)

    def parse(self) -> Reading[None]:
        while (yield from self.until(self.opens, self.content)):
            before, space = self.calls, (yield from self.space())
            wrong = (
                (yield from self.json_calls()) if (yield from self.peek()) in ("[", "{") else (yield from self._call())
            )
            if wrong is not None:
                self.wrong(OPEN + space, wrong, before)
            else:
                yield from self.space()

    def _call(self) -> Reading[str | None]:
        """Read a call that begins with its name. Return None, or the text of what is no call."""
        name = read = yield from self.match(WORD)
        mark, call_id = (yield from self.expect(self.marks)), ""
        read += mark or ""
        if mark == ID:
            call_id = yield from self.match(WORD)
            read += call_id + ((yield from self.expect(self.ids)) or "")
        read += yield from self.space()
        if not name or (yield from self.peek()) != "{":
            return read
        self.begin(name, call_id or None)
        yield from self.json_value(self.arguments)
        return None


def nine_characters() -> str:
    """Return an id as Mistral's templates want it: nine letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


FORM = ToolForm(
    name="mistral",
    parser=MistralParser,
    known_by=((OPEN,),),
    tags=(OPEN, ID, ARGUMENTS),
    opens=(OPEN,),
    frame=Frame(start=OPEN + "[", call='{"name": $QUOTED, "arguments": $ARGS}', between=", ", end="]"),
    newer=(ARGUMENTS, Frame(call=OPEN + "$NAME" + ARGUMENTS + "$ARGS", between="")),
    new_id=nine_characters,
)
