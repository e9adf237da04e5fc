"""Answers of gpt-oss, which are messages in channels. Reasoning is a channel, and a call is a message to a function:

<|channel|>analysis<|message|>It asks for weather.<|end|><|start|>assistant<|channel|>commentary to=functions.weather
<|constrain|>json<|message|>{"city": "Oslo"}<|call|>
<|channel|>final<|message|>It rains.<|return|>
"""

from __future__ import annotations

import re

from ridgeline.text.parsers.calls import CallParser, Escaping, Tools
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.scanner import Reading, Tags, Trimmed

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
WORD = re.compile(r"\s*(\w*)")


class HarmonyParser(CallParser):
    """Analysis, and what goes to tools of the model's own, is reasoning. Commentary without an addressee is content, as
    text that the user should see before a call. `head` is the part of the first message that the prompt has, from its
    header on. Without `calls` or `reasoning` these are content too."""

    heads = Tags(MESSAGE, END, CALL, RETURN)
    reasons = True
    firsts = Tags(START, CHANNEL, " to=")
    opens, bodies = Tags(START, CHANNEL), Tags(END, CALL, RETURN, START, CHANNEL)

    def __init__(
        self, tools: Tools | None = None, head: str = "", *, calls: bool = True, reasoning: bool = True
    ) -> None:
        super().__init__(tools)
        self._head, self._calls = head, calls
        self._analysis = self.reasoning if reasoning else self.content

    def parse(self) -> Reading[None]:
        tag: str | None = self._head
        if MESSAGE in self._head:
            tag = yield from self._body(self._head.partition(MESSAGE)[0])
        elif CHANNEL not in self._head:
            found = yield from self.expect(self.firsts)
            tag = found and self._head + found
        while True:
            if tag is None or tag in (END, CALL, RETURN):
                tag = yield from self.until(self.opens, self.content)
            if tag is None:
                return
            head, closed = yield from self.taken(self.heads)
            tag = (yield from self._body(tag + head)) if closed == MESSAGE else closed
            if tag is None and closed is None:
                return

    def _body(self, head: str) -> Reading[str | None]:
        """Read a message's text and return the tag behind it."""
        channel, recipient = head.partition(CHANNEL)[2], RECIPIENT.search(head)
        word = WORD.match(channel)
        if self._calls and recipient is not None and recipient[1].startswith("functions."):
            self.begin(recipient[1].removeprefix("functions."))
            arguments = Trimmed(Escaping(self.arguments))
            tag = yield from self.until(self.bodies, arguments, whole=False)
            if not arguments.begun and tag is not None:
                self.arguments("{}")
            return tag
        if not (self._calls and recipient) and (word is None or word[1] != "analysis"):
            return (yield from self.until(self.bodies, self.content))
        self.turn(True)
        tag = yield from self.until(self.bodies, self._analysis)
        self.turn(False, back=len(tag or ""))
        return tag


FORM = ToolForm(
    name="openai",
    aliases=("gpt_oss", "openai_gptoss", "harmony"),
    parser=HarmonyParser,
    known_by=((START, CHANNEL, MESSAGE),),
    tags=(START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN),
    frame=Frame(
        call=f"{START}assistant{CHANNEL}commentary to=functions.$NAME {CONSTRAIN}json{MESSAGE}$ARGS",
        between=CALL,
    ),
)
