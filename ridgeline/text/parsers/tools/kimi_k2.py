"""Tool calls in the form of Kimi K2, whose ids name the function and count the calls:

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed

ALL, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?P<number>:\d+)?")


class KimiParser(CallParser):
    opens, heads = Tags(ALL, CALL), Tags(ARGUMENTS, CALL_END, ALL_END)
    between = Tags(CALL, CALL_END, ALL_END)

    def parse(self) -> Reading[None]:
        while (tag := (yield from self.until(self.opens, self.content))) is not None:
            while tag is not None and tag != ALL_END:
                if tag == CALL and (tag := (yield from self._call())):
                    continue
                tag = yield from self.until(self.between, Trimmed(self.content))
            yield from self.space()

    def _call(self) -> Reading[str | None]:
        """Read a call's id and arguments. Return a tag if one has been read beyond them."""
        head, tag = yield from self.word(self.heads)
        found = ID.fullmatch(head.strip())
        if tag != ARGUMENTS or found is None:
            self.content(CALL + head + (tag or ""))
            return tag if tag != ARGUMENTS else None
        self.begin(found["name"], head.strip() if found["number"] else None)
        yield from self.json_arguments()
        return None


FORM = ToolForm(
    name="kimi_k2",
    parser=KimiParser,
    known_by=((ALL,), ("tool_declare", "<|im_middle|>")),  # its first template does not show calls
    tags=(ALL, ALL_END, CALL, ARGUMENTS, CALL_END),
    opens=(ALL, CALL),
    frame=Frame(start=ALL, call=f"{CALL}functions.$NAME:$INDEX{ARGUMENTS}$ARGS{CALL_END}", between="", end=ALL_END),
)
