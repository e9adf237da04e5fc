"""Forms of tool calls and of reasoning: how each is known, read, and held to by a grammar.

A form is one file in `tools/` or `reasoning/` with a `FORM`, and one line in that folder's `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.text.parsers.arguments import arguments_of
from ridgeline.text.parsers.calls import CallParser, Tools
from ridgeline.text.parsers.reader import call_id


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The text of forced calls: `start`, calls with `between` them, `end`.

    call: a call's text. In it stand $NAME (the bare name), $QUOTED (the name as JSON), $ARGS (the arguments as JSON)
        and $INDEX (any number).
    argument: the text of one argument, of those that $ARGS are then, with `separator` between them. In it stand $KEY
        (the bare name) and $VALUE. "": $ARGS are one JSON object.
    python: values are literals of Python. Otherwise strings stand as they are.
    """

    call: str
    argument: str = ""
    separator: str = ""
    python: bool = False
    start: str = ""
    between: str = "\n"
    end: str = ""

    @property
    def value_end(self) -> str | None:
        """The tag behind an argument's text; None where values are literals."""
        return None if self.python else self.argument.partition("$VALUE")[2].strip()

    def says(self, schema: Mapping[str, Any]) -> bool:
        """Return True if arguments by this schema can be forced in this form."""
        return not self.argument or arguments_of(schema, self.value_end) is not None


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form, as a flag or a template tells it.

    name, aliases: what it is called by. The names are vLLM's where it knows the form.
    known_by: words of chat templates. A template that has all words of one entry teaches this form.
    """

    name: str
    known_by: tuple[tuple[str, ...], ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolForm(Form):
    """A form of tool calls.

    parser: makes the parser, for the tools that a request offers.
    tags: texts that the parser needs to see, even where they are special tokens of the model.
    opens: those of the tags that can only begin calls. They end reasoning that the model forgot to end.
    frame: the text of forced calls. Those that it cannot say are written as Hermes does (`Frame.says`).
    newer: a tag and the frame that models with this tag were taught instead.
    new_id: makes the ids of calls whose text names none.
    """

    parser: Callable[[Tools], CallParser]
    tags: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    frame: Frame | None = None
    newer: tuple[str, Frame] | None = None
    new_id: Callable[[], str] = call_id


@dataclass(frozen=True, kw_only=True)
class ReasoningForm(Form):
    """A form in which reasoning is set apart, between two tags.

    label: a word behind the first tag that is no part of the reasoning.
    begins, ends: the tags, of which any may stand. The first of `ends` is the one that a spent budget forces.
    before_end: text that a spent budget forces before the tag.
    opening, call_ends: what forced calls stand behind, and where reasoning ends before them, if that is not as in other
        answers.
    around: the tags that stand around the answer, or none.
    implied: text without a tag before it is reasoning unless the prompt has closed it.
    switch: the argument of the template by which a request turns the reasoning off, where text without a tag is then
        none.
    channels: reasoning, calls and content are messages of one form, which one parser reads.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    label: str = ""
    before_end: str = ""
    opening: str = ""
    call_ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    implied: bool = False
    switch: str = ""
    channels: bool = False
