"""Reasoning between two tags, with which the prompt may have begun already:

<think>
It asks for weather.
</think>

It rains.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.scanner import Reading, Scanner, Tags, Trimmed

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Scanner):
    """The parser of one stretch of reasoning, which stands at the beginning. White space around it is left out. An end
    that is the first of the text belongs to no reasoning, and is left out as well.

    inside: the prompt ends within the reasoning.
    interrupts: tags that can only begin calls. They end reasoning that the model forgot to end, and are content.
    """

    reasons = True

    def __init__(self, form: ReasoningForm, *, inside: bool, interrupts: Sequence[str] = ()) -> None:
        self._inside = inside
        self._begins = Tags(*form.begins)
        self._labels = Tags(form.label) if form.label else None
        self._around = [Tags(tag) for tag in form.around]
        self._interrupts = interrupts
        self._closes, self._ends = Tags(*form.ends), Tags(*form.ends, *interrupts)
        super().__init__()

    def parse(self) -> Reading[None]:
        blank = yield from self.space()
        begun = yield from self.expect(self._begins)
        if begun and self._labels is not None:
            yield from self.space()
            yield from self.expect(self._labels)
        if begun or self._inside:
            self.turn(True, back=len(blank) if self._inside else 0)
            tag = yield from self.until(self._ends, Trimmed(self.reasoning))
            self.turn(False, back=len(tag or ""))
        elif (tag := (yield from self.expect(self._closes))) is None:
            self.content(blank)
            yield from self.until(NONE, self.content)
            return
        if tag in self._interrupts:
            self.content(tag or "")
        else:
            yield from self.space()
            if self._around and (yield from self.expect(self._around[0])):
                yield from self.until(self._around[1], Trimmed(self.content))
                yield from self.space()
        yield from self.until(NONE, self.content)


NONE = Tags()
FORM = ReasoningForm(
    name="think",
    aliases=("deepseek_v3", "deepseek_v31", "deepseek_v4", "glm45", "glm47", "kimi_k2", "olmo3", "holo2", "mimo"),
    begins=(OPEN,),
    ends=(CLOSE,),
    known_by=((CLOSE,),),
)
