"""Flags that take several words: `--stop a b` is `--stop a --stop b`, in every verb.

A list keeps every word up to the next flag. What a verb works on (a model, prompts, files) therefore stands before the
flags or behind `--`, and no word of a list can be mistaken for it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand

from ridgeline.core.errors import InvalidConfig

SECRETS = frozenset(
    {"admin-key", "api-key", "hf-token", "trusted-key", "ssl-keyfile-password", "worker-api-key"}
)  # no message repeats their words
INSTEAD = frozenset({"--rungs"})  # lists whose words take the place of what a verb works on
SEVERAL = -1  # for a flag that takes all words up to the next flag


class ListCommand(TyperCommand):
    """A verb with flags that take several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        params = self.get_params(ctx)
        takes = {
            spelled: 0 if getattr(option, "is_flag", False) else SEVERAL if option.multiple else option.nargs
            for option in params
            if option.param_type_name == "option"
            for spelled in (*option.opts, *option.secondary_opts)
        }
        found = spelled_out(args, takes)
        arguments = [(p.metavar or p.name).upper() for p in params if p.param_type_name == "argument"]
        if arguments and not found.bare:
            tell_where(arguments[0], [flag for flag in found.several if flag not in INSTEAD])
        return super().parse_args(ctx, found.words)


@dataclass
class SpelledOut:
    """A command line in which each flag has one word.

    bare: how many words belong to no flag.
    several: flags that had several words.
    """

    words: list[str] = field(default_factory=list)
    bare: int = 0
    several: list[str] = field(default_factory=list)


def spelled_out(words: list[str], takes: Mapping[str, int]) -> SpelledOut:
    """Return a command line with one word after each flag of a list. `takes` says how many words follow each flag.
    Raise InvalidConfig for a list without words."""
    found, place = SpelledOut(), 0
    while place < len(words):
        word = words[place]
        place += 1
        flag, equals, value = word.partition("=")
        if word == "--":
            check_behind(words[place:])
            found.bare += len(words) - place
            found.words += words[place - 1 :]
            break
        if is_word(word):
            found.bare += 1
            found.words.append(word)
        elif takes.get(flag) == SEVERAL:
            values = [value] if equals else []
            while place < len(words) and _goes_on(words[place], values, takes):
                values.append(words[place])
                place += 1
            check_list(flag, values)
            check_secret(flag, words[place:], takes, several=True)
            found.words += [part for value in values for part in (flag, value)]
            found.several += [flag] if len(values) > 1 else []
        else:
            count = 0 if equals else takes.get(flag, 0)
            found.words += words[place - 1 : place + count]
            place += count
            check_secret(flag, words[place:], takes, several=False)
    return found


def is_word(text: str) -> bool:
    """Return False for what looks like a flag."""
    return text[:1] != "-" or text == "-"


def _goes_on(word: str, values: list[str], flags: Collection[str]) -> bool:
    """Return True if a word belongs to a list that has these values. The first may look like a flag, as -1 does."""
    return is_word(word) or (not values and word != "--" and word.partition("=")[0] not in flags)


def check_list(flag: str, values: list[str]) -> None:
    """Raise InvalidConfig for a list without words."""
    if not values:
        raise InvalidConfig(f"{flag} needs at least one word.")


def check_secret(flag: str, rest: list[str], flags: Collection[str], *, several: bool) -> None:
    """Raise InvalidConfig if `rest`, the words behind those of a flag, begins with what may be a part of its secret: a
    word, where the flag takes one, or what looks like a flag and is none."""
    following = rest[0].partition("=")[0] if rest else "--"
    if not _is_secret(flag) or following == "--" or following in flags:
        return
    if is_word(rest[0]):
        if not several:
            raise InvalidConfig(
                f"{flag} takes one word, and another follows; put quotes around a secret with spaces, and name a model "
                "before the flags or behind --."
            )
        return
    near = get_close_matches(following, flags, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InvalidConfig(
        f"what follows {flag} and its value begins with - and is no flag{hint}; a secret that begins so is written "
        f"{flag}=SECRET."
    )


def check_behind(words: list[str]) -> None:
    """Raise InvalidConfig if a flag with secret words stands behind `--`, where no word is a flag."""
    for flag in (word.partition("=")[0] for word in words if word[:1] == "-"):
        if _is_secret(flag):
            raise InvalidConfig(f"{flag} stands behind --, where no word is a flag; put it before.")


def _is_secret(flag: str) -> bool:
    return flag.lstrip("-").replace("_", "-") in SECRETS


def tell_where(argument: str, several: Collection[str]) -> None:
    """Print where an argument stands that was not given while these lists had several words."""
    for flag in dict.fromkeys(several):
        print(
            f"ridgeline: all words after {flag} are its own; {argument} stands before the flags or behind --.",
            file=sys.stderr,
        )
