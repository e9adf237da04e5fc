"""The core that all parsers share: text that comes in pieces, read as if it were whole.

A parser is a generator, `parse`, that reads its text through the methods here. A method waits (it yields) until more
text could not change its answer. So what a parser finds never depends on where the text was cut, and its file reads as
the description of a form:

    def parse(self) -> Reading[None]:
        while (yield from self.until(self.tags, self.content)):
            ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from ridgeline.text.parsers.events import Content, Event, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
Give = Callable[[str], None]

SPACE = re.compile(r"\s*")


class Tags:
    """Some fixed texts that are looked for together. None may begin with another."""

    def __init__(self, *texts: str) -> None:
        assert not any(a != b and b.startswith(a) for a in texts for b in texts), f"a tag begins with another: {texts}"
        self.texts = texts
        self.find = re.compile("|".join(map(re.escape, texts)) or r"(?!)").search
        first = "".join(re.escape(char) for char in sorted({text[0] for text in texts}))
        self.starts = re.compile(f"[{first}]" if first else r"(?!)").search  # finds where a tag may begin
        self._longest = max(map(len, texts), default=0) - 1

    def begun(self, text: str) -> int:
        """Return how many characters at the end of the text may be the beginning of a tag."""
        start = self.starts(text, max(0, len(text) - self._longest))
        while start is not None:
            rest = text[start.start() :]
            if any(tag.startswith(rest) for tag in self.texts):
                return len(rest)
            start = self.starts(text, start.end())
        return 0


class Scanner:
    """The base of parsers. `position` counts the characters that were read for good. `turns` lists where reasoning
    begins (True) and ends (False). `reasons` says that a parser looks for it."""

    reasons = False

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._found: list[Event] = []
        self._run: Reading[None] | None = self.parse()
        self.position = 0
        self.turns: list[tuple[int, bool]] = []

    def parse(self) -> Reading[None]:
        """Read the whole text. What is left when this returns is content."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        """Return what is certain after a further piece of text."""
        self._text += text
        return self._resume()

    def finish(self) -> list[Event]:
        """Return what was held back. No more text comes."""
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        while self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
            else:
                if not self._ended:
                    break
        if self._run is None and self._text:
            self.content(self.cut(len(self._text)))
        found, self._found = self._found, []
        return found

    # ---- what was found -----------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        self._found.append(event)

    def content(self, text: str) -> None:
        if text:
            self._found.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._found.append(Reasoning(text))

    def drop(self, text: str) -> None:
        """Give nothing of the text."""

    def turn(self, reasoning: bool, back: int = 0) -> None:
        """Note that reasoning begins or ends, `back` characters before the place that was read."""
        self.turns.append((self.position - back, reasoning))

    # ---- what is read -------------------------------------------------------------------------------------------

    def cut(self, length: int) -> str:
        """Take so many characters for good."""
        taken, self._text = self._text[:length], self._text[length:]
        self.position += length
        return taken

    def more(self) -> Reading[bool]:
        """Wait for more text. Return False if none comes."""
        if not self._ended:
            yield
        return not self._ended

    def until(self, tags: Tags, give: Give, *, whole: bool = True) -> Reading[str | None]:
        """Give text as it comes up to the first of the tags, which is taken and returned; None if the text ends. A tag
        that has begun there is given only if the text is `whole` without it."""
        while True:
            text = self._text
            if text and tags.starts(text) is None:  # most texts, so this is done before all else
                self.position += len(text)
                self._text = ""
                give(text)
            elif text:
                found = tags.find(text)
                if found is not None:
                    if found.start():
                        give(self.cut(found.start()))
                    return self.cut(len(found[0]))
                certain = len(text) - (0 if self._ended and whole else tags.begun(text))
                if certain:
                    give(self.cut(certain))
            if self._ended:
                self.cut(len(self._text))
                return None
            yield

    def taken(self, tags: Tags) -> Reading[tuple[str, str | None]]:
        """Return the text up to the first of the tags, and the tag, as `until` does."""
        parts: list[str] = []
        tag = yield from self.until(tags, parts.append)
        return "".join(parts), tag

    def expect(self, tags: Tags) -> Reading[str | None]:
        """Take and return the tag with which the text goes on, or None if it goes on with none of them."""
        while True:
            for tag in tags.texts:
                if self._text.startswith(tag):
                    return self.cut(len(tag))
            if self._ended or not any(tag.startswith(self._text) for tag in tags.texts):
                return None
            yield

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take and return a run of characters, such as a name. The pattern is a class of characters, repeated."""
        end = 0
        while True:
            found = pattern.match(self._text, end)  # what was looked at is not looked at again
            end = found.end() if found else end
            if end < len(self._text) or self._ended:
                return self.cut(end)
            yield

    def space(self) -> Reading[str]:
        """Take and return white space."""
        return self.match(SPACE)

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; "" if the text ends."""
        while not self._text and not self._ended:
            yield
        return self._text[:1]


class Trimmed:
    """A giver that leaves out white space at both ends of what it is given."""

    def __init__(self, give: Give) -> None:
        self._give, self._held, self.begun = give, "", False

    def __call__(self, text: str) -> None:
        if not self.begun:
            text = text.lstrip()
        text = self._held + text
        bare = text.rstrip()
        self._held = text[len(bare) :]
        if bare:
            self.begun = True
            self._give(bare)
