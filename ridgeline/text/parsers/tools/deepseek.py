"""Tool calls in the form of DeepSeek V3 and R1, and in that of V3.1, which has the name first and no fence:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import WRAPPER, CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, BREAK, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
LINE, FENCE = re.compile(r"[^\n{<`]*"), re.compile(r"[^{<]*")


class DeepSeekParser(CallParser):
    """Both forms are read. What stands behind the separator tells them apart."""

    opens, between = Tags(ALL, CALL), Tags(CALL, ALL_END)
    breaks, ends = Tags(BREAK, CALL_END, ALL_END), Tags(CALL_END, CALL, ALL_END)

    def parse(self) -> Reading[None]:
        while (tag := (yield from self.until(self.opens, self.content))) is not None:
            while tag is not None and tag != ALL_END:
                tag = yield from (self._call() if tag == CALL else self.until(self.between, Trimmed(self.content)))
            yield from self.space()

    def _call(self) -> Reading[str | None]:
        """Read on from the opening tag of a call to its end, and return the tag there."""
        name, tag = yield from self.word(self.breaks)
        read = CALL + name + (tag or "")
        if tag == BREAK:
            read += yield from self.space()
            if (yield from self.peek()) != "{":  # V3 has the name here, and "function" before
                line = yield from self.match(LINE)
                name = line if (yield from self.peek()) else ""
                read += line + (yield from self.match(FENCE))
            if name.strip():
                self.begin(name.strip())
                yield from self._arguments(name.strip())
                return (yield from self.until(self.ends, self.drop))
        self.content(read)
        return tag or (yield from self.until(self.ends, self.content))

    def _arguments(self, name: str) -> Reading[None]:
        """Read a call's arguments, out of an object `arguments` if that is all there is."""
        yield from self.space()
        if not self.wraps(name) or (yield from self.expect(OBJECT)) is None:
            yield from self.json_arguments()
            return
        read = "{"
        for tags in (KEY, COLON):
            read += yield from self.space()
            if (found := (yield from self.expect(tags))) is None:
                break
            read += found
        else:
            read += yield from self.space()
            if (yield from self.peek()) == "{":
                parts = list[str]()
                yield from self.json_value(parts.append)
                behind = yield from self.space()
                if (yield from self.peek()) == "}":
                    self.cut(1)
                    self.arguments("".join(parts))
                    return
                read += "".join((*parts, behind))
        yield from self.json_value(self.arguments, read)


OBJECT, KEY, COLON = Tags("{"), Tags(f'"{WRAPPER}"'), Tags(":")
TAGS = (ALL, ALL_END, CALL, BREAK, CALL_END)
V3 = ToolForm(
    name="deepseek_v3",
    parser=DeepSeekParser,
    known_by=((ALL, "```json"),),
    tags=TAGS,
    opens=(ALL, CALL),
    frame=Frame(
        start=ALL,
        call=f"{CALL}function{BREAK}$NAME\n```json\n$ARGS\n```{CALL_END}",
        between="\n",
        end=ALL_END,
    ),
)
V31 = ToolForm(
    name="deepseek_v31",
    parser=DeepSeekParser,
    known_by=((ALL,),),
    tags=TAGS,
    opens=(ALL, CALL),
    frame=Frame(start=ALL, call=f"{CALL}$NAME{BREAK}$ARGS{CALL_END}", between="", end=ALL_END),
)
