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
WORD = re.compile(r"[^\s<>]*")
MOST_SPACE = 64  # white space behind which a tag is still looked for


class Tags:
    """Some fixed texts that are looked for together. None may begin with another."""

    def __init__(self, *texts: str) -> None:
        assert not any(a != b and b.startswith(a) for a in texts for b in texts), f"a tag begins with another: {texts}"
        self.texts = texts
        self.find = re.compile("|".join(map(re.escape, texts)) or r"(?!)").search
        first = "".join(re.escape(char) for char in sorted({text[0] for text in texts}))
        self.starts = re.compile(f"[{first}]" if first else r"(?!)").search  # finds where a tag may begin
        self.longest = max(map(len, texts), default=0)

    def begun(self, text: str, at: int) -> int:
        """Return the number of characters at the end of the text, which is read from `at` on, that may begin a tag."""
        start = self.starts(text, max(at, len(text) - self.longest + 1))
        while start is not None:
            rest = text[start.start() :]
            if any(tag.startswith(rest) for tag in self.texts):
                return len(rest)
            start = self.starts(text, start.end())
        return 0


class Scanner:
    """The base of parsers. `position` counts the characters that were read for good. `turns` lists where reasoning
    begins (True) and ends (False). `reasons` says that a parser looks for it.

    `_text` is the last piece, read up to `_at`. A method that waits leaves no more of it than a tag's length and keeps
    the rest in a list of its own, so a text takes time in proportion to its length, in one piece or in many.
    """

    reasons = False

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._ended = False
        self._found: list[Event] = []
        self._run: Reading[None] | None = self.parse()
        self.position = 0
        self.turns: list[tuple[int, bool]] = []

    def parse(self) -> Reading[None]:
        """Read the whole text. What is left when this returns is content."""
        raise NotImplementedError

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after a further piece of text."""
        self._text, self._at = self._text[self._at :] + text, 0
        return self._resume()

    def finish(self) -> list[Event]:
        """Return the events that were held back. No more text comes."""
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
        if self._run is None:
            self.content(self.cut(self.left))
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

    @property
    def left(self) -> int:
        """The number of characters that have come and are not read."""
        return len(self._text) - self._at

    def cut(self, length: int) -> str:
        """Take so many characters for good."""
        self.position += length
        return self._pass(length)

    def _pass(self, length: int) -> str:
        start, self._at = self._at, self._at + length
        return self._text[start : self._at]

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
            start = tags.starts(text, self._at)
            if start is None:  # most texts, so this is done first
                if self.left:
                    give(self.cut(self.left))
            else:
                found = tags.find(text, start.start())
                if found is not None:
                    if found.start() > self._at:
                        give(self.cut(found.start() - self._at))
                    return self.cut(len(found[0]))
                certain = self.left - (0 if self._ended and whole else tags.begun(text, self._at))
                if certain:
                    give(self.cut(certain))
            if self._ended:
                self.cut(self.left)
                return None
            yield

    def taken(self, tags: Tags) -> Reading[tuple[str, str | None]]:
        """Return the text up to the first of the tags, and the tag, as `until` does."""
        parts: list[str] = []
        tag = yield from self.until(tags, parts.append)
        return "".join(parts), tag

    def word(self, tags: Tags) -> Reading[tuple[str, str | None]]:
        """Return a word, such as a name, with the white space around it, and the tag behind it; None if none is
        there. A word has no white space and none of the tags' signs within."""
        text = yield from self.space()
        text += yield from self.match(WORD)
        text += yield from self.space()
        return text, (yield from self.expect(tags))

    def expect(self, tags: Tags) -> Reading[str | None]:
        """Take and return the tag with which the text goes on, or None if it goes on with none of them."""
        while True:
            text = self._text[self._at : self._at + tags.longest]
            for tag in tags.texts:
                if text.startswith(tag):
                    return self.cut(len(tag))
            if self._ended or not any(tag.startswith(text) for tag in tags.texts):
                return None
            yield

    def follows(self, tags: Tags, space: int = MOST_SPACE) -> Reading[bool]:
        """Return True if one of the tags comes behind at most `space` characters of white space, or the text ends on
        the way to it. Nothing is taken."""
        while True:
            text = self._text[self._at : self._at + space + tags.longest]
            rest = text.lstrip()
            if len(text) - len(rest) > space:
                return False
            if any(rest.startswith(tag) for tag in tags.texts):
                return True
            if not any(tag.startswith(rest) for tag in tags.texts):
                return False
            if self._ended:
                return True
            yield

    def ahead(self, tags: Tags, most: int) -> Reading[str | None]:
        """Return the text before the first of the tags, or before the end of the text, if that comes within `most`
        characters, otherwise None. Nothing is taken."""
        while True:
            text = self._text[self._at : self._at + most + tags.longest]
            if (found := tags.find(text)) is not None:
                return text[: found.start()]
            if len(text) == most + tags.longest:
                return None
            if self._ended:
                return text
            yield

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take and return a run of characters, such as a name. The pattern is a class of characters, repeated."""
        parts: list[str] = []
        while True:
            if (found := pattern.match(self._text, self._at)) is not None:
                parts.append(self._pass(len(found[0])))
            if self.left or self._ended:
                run = "".join(parts)
                self.position += len(run)  # only now, because what it belongs to was not known
                return run
            yield

    def space(self) -> Reading[str]:
        """Take and return white space."""
        return self.match(SPACE)

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; "" if the text ends."""
        while not self.left and not self._ended:
            yield
        return self._text[self._at : self._at + 1]


class Trimmed:
    """A giver that leaves out white space, or other characters, at both ends of what it is given."""

    def __init__(self, give: Give, chars: str | None = None) -> None:
        self._give, self._chars, self.begun = give, chars, False
        self._held: list[str] = []  # what may be the last

    def __call__(self, text: str) -> None:
        if not self.begun:
            text = text.lstrip(self._chars)
        bare = text.rstrip(self._chars)
        if bare:
            self.begun = True
            self._give("".join((*self._held, bare)))
            self._held.clear()
        self._held.append(text[len(bare) :])

    def give_held(self) -> None:
        """Give what was left out at the end, where what was given only broke off."""
        if self.begun:
            self._give("".join(self._held))
