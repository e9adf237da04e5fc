"""Tool calls in the form that Hermes and Qwen models were taught:

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from ridgeline.text.parsers.calls import CallParser
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Arguments are passed on as the model writes them, as soon as the call's name is known and they prove to be an
    object. A call in another order or form waits for its end. Text that is no call is content, tags included. White
    space after a call is dropped."""

    opened = OPEN
    opens = Tags(OPEN)
    either = Tags(OPEN, CLOSE)

    def parse(self) -> Reading[None]:
        tag = yield from self.until(self.opens, self.content)
        while tag is not None:
            tag = yield from self._call()
            if tag != self.opened:
                tag = yield from self.until(self.opens, self.content)

    def _call(self) -> Reading[str | None]:
        """Read on from the opening tag of a call to its end, and return the tag there."""
        text = yield from self.space()
        wrong = (yield from self.json_call()) if (yield from self.peek()) == "{" else ""
        if wrong is not None:
            self.content(self.opened + text + wrong)
            tag = yield from self.until(self.either, self.content)
            self.content(tag if tag and tag != self.opened else "")
            return tag
        tag = yield from self.until(self.either, self.drop)  # the model may forget to close a call
        if tag != self.opened:
            yield from self.space()
        return tag


FORM = ToolForm(
    name="hermes",
    aliases=("qwen2", "qwen25", "qwen3", "qwen3_json", "granite4", "ernie45"),
    parser=HermesParser,
    known_by=((OPEN, '"arguments"'), (OPEN,)),
    tags=(OPEN, CLOSE),
    opens=(OPEN,),
    frame=Frame(call='<tool_call>\n{"name": $QUOTED, "arguments": $ARGS}\n</tool_call>', between="\n"),
)
