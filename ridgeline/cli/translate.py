"""vLLM's command lines as our own: lists of values, underscores, objects spelled by their keys, and its flags
(core/settings/vllm_flags.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ridgeline.cli.lists import SECRETS, check_behind, check_list, check_secret, is_word
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.vllm_flags import ALIASES, FLAGS, KV_TRANSFER, VALUES, Flag, State, Takes, of_kv_transfer

MODEL = "model"  # an argument of ours, and a flag of vLLM's
NEGATIONS = (("no-", ""), ("disable-", "enable-"), ("enable-", "disable-"))


class Line(NamedTuple):
    """A flag as it was given, what became of it (None: it stayed, with another value or place), and a sentence."""

    flag: str
    state: State | None
    text: str


@dataclass
class Translation:
    """The words of our command, and a line for everything that differs from what was given.

    models: what is served, each once.
    unknown: flags that neither server defines, with their values.
    several: lists that had several words.
    """

    words: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    unknown: list[list[str]] = field(default_factory=list)
    several: list[str] = field(default_factory=list)

    @property
    def refused(self) -> list[Line]:
        return [line for line in self.lines if line.state is State.REFUSED]


class _Given(NamedTuple):
    """A flag of a command line. `spelled` is how, and `positive` is False for its form that turns it off."""

    spelled: str
    name: str
    values: list[str]
    positive: bool = True


def translate(words: list[str], own: Mapping[str, Takes]) -> Translation:
    """Return vLLM's words (or ours) as ours. `own` holds our flags by name, with dashes."""
    found, objects = Translation(), dict[str, dict[str, Any]]()
    lists: list[str] = []
    for given in _read(words, own):
        name, values = given.name, given.values
        if not name:
            found.models.append(given.spelled)
        elif name == MODEL:
            found.models += values
            found.lines.append(Line(given.spelled, None, "the model is an argument without a flag."))
        elif "." in name:
            head, *keys = name.split(".")
            if own.get(head, Takes.VALUE) is not Takes.VALUE:
                raise InvalidConfig(f"--{head} is no object, so {given.spelled} sets nothing; use --{head} itself.")
            if not _put(objects.setdefault(head, {}), keys, values[-1] if values else "true"):
                found.lines.append(Line(given.spelled, State.REFUSED, "given already; leave one of them out."))
        elif name in own and own[name] is Takes.LIST:
            listed = [item for value in values for item in items(value)]
            check_list(given.spelled, listed)
            lists += [part for item in listed for part in (f"--{name}", item)]
            found.several += [given.spelled] if len(listed) > 1 else []
        elif name in own:
            found.words += _ours(name, given, found)
        elif name in FLAGS:
            _theirs(FLAGS[name], given, own, found)
        else:
            found.unknown.append([given.spelled, *values])
    for name, value in objects.items():
        text = json.dumps(value, ensure_ascii=False)
        if name in own and f"--{name}" in found.words:
            found.lines.append(Line(f"--{name}", State.REFUSED, "given as an object, and by its keys; take one."))
        elif name in own:
            found.words += [f"--{name}", text]
        elif name in FLAGS:
            _theirs(FLAGS[name], _Given(f"--{name}.…", name, [text]), own, found)
        else:
            found.unknown.append([f"--{name}", text])
    found.words += lists
    return found


def items(text: str) -> list[str]:
    """Return the texts of a JSON list, or the text itself."""
    if text[:1] == "[":
        try:
            listed = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
            return listed
    return [text]


def _read(words: list[str], own: Mapping[str, Takes]) -> Iterator[_Given]:
    """Yield the flags of a command line with their values, and words by themselves with an empty name."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        short = word.partition("=")[0]
        if (alias := short.partition(".")[0]) in ALIASES and alias != "-O":
            short, word = alias, f"--{ALIASES[alias]}{word[len(alias) :]}"
        if short not in ALIASES and word[:2] == "-O" and word[2:]:
            short, word = "-O", f"-O={word[2:].lstrip('=')}"
        if word == "--":
            check_behind(words[place:])
            yield from (_Given(each, "", []) for each in words[place:])
            return
        if word[:2] != "--" and short not in ALIASES:
            yield _Given(word, "", []) if word[:1] != "-" or len(word) < 2 else _Given(word, word, [])
            continue
        head, equals, value = word.partition("=")
        name, positive = _known(ALIASES.get(head) or _dashed(head[2:]), own)
        takes = own.get(name) or (FLAGS[name].takes if name in FLAGS else None)
        takes = Takes.VALUE if name == MODEL or "." in name else takes
        values = [value] if equals else []
        while place < len(words) and not (equals and takes is not Takes.LIST):
            if not _goes_on(takes, values, words[place], own):
                break
            values.append(words[place])
            place += 1
        rest = words[place:]
        check_secret(head, [] if _is_flag(rest, own) else rest, _spelled(own), several=takes is Takes.LIST)
        yield _Given(head, name, values, positive)


def _goes_on(takes: Takes | None, values: list[str], word: str, own: Mapping[str, Takes]) -> bool:
    """Return True if this word belongs to a flag that has these values."""
    if takes is Takes.VALUE:
        return not values
    if takes is None:
        return not values and word[:1] != "-"
    return takes is Takes.LIST and (is_word(word) or not (values or _is_flag([word], own)))


def _is_flag(words: list[str], own: Mapping[str, Takes]) -> bool:
    """Return True if the first of these words is a flag that there is, or ends the flags."""
    head = words[0].partition("=")[0] if words else "--"
    short = head.partition(".")[0]
    if head == "--" or short in ALIASES or re.fullmatch(r"-O\d", short):
        return True
    name = _known(_dashed(head[2:]), own)[0].partition(".")[0]
    return head[:2] == "--" and (name in own or name in FLAGS or name == MODEL)


def _spelled(own: Mapping[str, Takes]) -> set[str]:
    return {f"--{name}" for name in (*own, *FLAGS)}


def _dashed(name: str) -> str:
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys


def _known(name: str, own: Mapping[str, Takes]) -> tuple[str, bool]:
    """Return the name of a flag that there is, and False if this is its form that turns it off."""
    if name in own or name in FLAGS:
        return name, True
    for prefix, instead in NEGATIONS:
        other = instead + name.removeprefix(prefix)
        takes = own.get(other) or (FLAGS[other].takes if other in FLAGS else None)
        if name.startswith(prefix) and takes is Takes.NOTHING:
            return other, False
    return name, True


def _put(into: dict[str, Any], keys: list[str], text: str) -> bool:
    """Set a value of an object by the keys that lead to it; a key with + adds to a list. Return False if another value
    stands there."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for key in keys[:-1]:
        inner: object = into.setdefault(key, {})
        if not isinstance(inner, dict):
            return False
        into = inner
    last, more = keys[-1].removesuffix("+"), keys[-1].endswith("+")
    if last in into and not (more and isinstance(into[last], list)):
        return False
    if more:
        into.setdefault(last, []).extend(value if isinstance(value, list) else str(value).split(","))
    else:
        into[last] = value
    return True


def _ours(name: str, given: _Given, found: Translation) -> list[str]:
    if not given.positive:
        return [f"--no-{name}"]
    values = [VALUES.get(name, {}).get(value, value) for value in given.values]
    if values != given.values:
        found.lines.append(Line(f"--{name} {given.values[0]}", None, f"{values[0]} is the same here."))
    return [f"--{name}", *values]


def _theirs(flag: Flag, given: _Given, own: Mapping[str, Takes], found: Translation) -> None:
    if flag.name == KV_TRANSFER.replace("_", "-"):
        _kv_transfer(given, found)
        return
    value: object = given.positive if flag.takes is Takes.NOTHING else " ".join(given.values)
    spelled = " ".join([given.spelled, *([] if flag.name in SECRETS else given.values)])
    if flag.state is State.ACCEPTED or (flag.state is State.REFUSED and flag.is_harmless(value)):
        text = flag.text if flag.state is State.ACCEPTED else "this asks for what happens anyway"
        found.lines.append(Line(spelled, State.ACCEPTED, f"no effect: {text}."))
    elif flag.state is State.REFUSED:
        found.lines.append(Line(spelled, State.REFUSED, f"not supported: {flag.text}."))
    else:
        positive = flag.ours if given.positive else f"--{flag.ours.removeprefix('--no-')}"
        values = [VALUES.get(flag.name, {}).get(each, each) for each in given.values]
        found.words += [part for each in values for part in (positive, each)] or [positive]
        found.lines.append(Line(spelled, State.RENAMED, f"{' '.join([positive, *values])}: {flag.text}."))


def _kv_transfer(given: _Given, found: Translation) -> None:
    """Translate vLLM's object for connectors, which is several flags here."""
    try:
        settings = of_kv_transfer(" ".join(given.values) or "{}")
    except InvalidConfig as error:
        found.lines.append(Line(given.spelled, State.REFUSED, f"not supported here: {str(error).rstrip('.')}."))
        return
    words = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", f"{value}")]
    found.words += words
    state = State.RENAMED if words else State.ACCEPTED
    found.lines.append(Line(given.spelled, state, f"{' '.join(words) or 'nothing'}: the same here."))
