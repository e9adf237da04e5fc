"""Custom tools whose input follows a grammar of the client.

For the model such a tool is a function with one text, so its input stands within JSON, and the grammar is that of the
text's spelling there (grammars/quoted.py). Forced calls have no other form. Where the model may call or not, all that
it writes is free up to the name of such a tool in a call, and from there to the end of that call the grammar holds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.grammars.grammar import MOST_CHARS
from ridgeline.serving.grammars.quoted import literal
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.text.parsers.choose import Forms
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.transport.messages import Grammar

INPUT = "input"  # the argument of a custom tool
MOST_HELD = 32_768  # characters of all grammars of one request
LEFT_OUT = "tools.format"
ANCHORS = re.compile(r"^\^|(?<!\\)\$$")
ANY = r"(.|\n)*"
SPACE = r"[ \t\n]{0,16}"


async def hold_inputs(api: ApiServer, body: ChatBody, formats: Mapping[str, Any]) -> list[str]:
    """Let the body know the grammars of its custom tools, by their names in the chat. Return the entry of the answer's
    header if there is one that cannot be held to."""
    room, free = MOST_HELD, False
    for name, form in formats.items():
        try:
            text = (await api.grammar_checks.check(Grammar(kind="quoted", text=_lark(form)))).text
        except InvalidRequest:
            text = ""
        room -= len(text)
        free = free or not text or room < 0
        if text and room >= 0:
            body.held[name] = text
    if body.held and body.tool_choice in (None, "auto") and not await _holds(api, body):
        body.held.clear()
        free = True
    return [LEFT_OUT] if free else []


async def _holds(api: ApiServer, body: ChatBody) -> bool:
    """Return True if calls that are not forced can be held to their grammars."""
    form = body.response_format
    if body.structured_outputs is not None or (form is not None and form.type != "text"):
        return False
    grammar = free_calls(body, api.tokenizer, api.forms)
    try:
        return grammar is not None and bool(await api.grammar_checks.check(grammar))
    except InvalidRequest:
        return False


def _lark(form: Any) -> str:
    """Return a format's grammar in Lark's syntax. Raise InvalidRequest."""
    syntax, text = form.get("syntax"), form.get("definition")
    if not isinstance(text, str) or syntax not in ("lark", "regex"):
        raise InvalidRequest("the format is no grammar")
    if syntax == "lark":
        return text
    if len(text) > MOST_CHARS:  # before any work on it
        raise InvalidRequest(f"the format has {len(text)} characters; at most {MOST_CHARS} are allowed")
    return "start: /" + re.sub(r"(?<!\\)/", r"\/", ANCHORS.sub("", text)) + "/"


def input_rules(rule: str, argument: str, held: str) -> list[str]:
    """Return the rules of a custom tool's only argument. argument: its text, with $VALUE in it."""
    before, _, behind = argument.partition("$VALUE")
    return [f"{rule}: {json.dumps(before)} {rule}_v {json.dumps(behind)}", _named(f"{rule}_v", held)]


def _named(rule: str, grammar: str) -> str:
    return f"{rule}: %lark {{\n{grammar}\n}}"


class _Shape(NamedTuple):
    """The text of a call: a tag that opens it, `lead`, the name (`quoted` or bare), `behind`, the arguments, `tail`.

    tags finds tags in a text, and `special` has the ids of those that are special tokens.
    """

    opens: str
    lead: str
    quoted: bool
    behind: str
    tail: str
    tags: re.Pattern[str]
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, forms: Forms) -> _Shape | None:
        """Return the shape of the model's calls; None for a form that does not show where a call begins, or whose
        arguments are not JSON."""
        form, added = forms.tools, tokenizer.added
        if form is None or form.frame is None or form.frame.argument or forms.channels or not form.tags:
            return None
        frame = form.newer[1] if form.newer is not None and form.newer[0] in added else form.frame
        tags = re.compile("|".join(map(re.escape, sorted(form.tags, key=len, reverse=True))))
        head, _, tail = frame.call.partition("$ARGS")
        before, mark, behind = re.split(r"(\$NAME|\$QUOTED)", head)
        opening = [*tags.finditer(before)][-1:]
        if not opening or not behind or tags.match(behind):  # or one name may be the beginning of another
            return None
        special = {tag: added[tag] for tag in form.tags if added.get(tag) in tokenizer.special_ids}
        return cls(opening[0][0], before[opening[0].end() :], mark == "$QUOTED", behind, tail, tags, special)

    def begun(self, name: str) -> str:
        """Return the pattern of a call up to the end of its name."""
        return _loose(self.lead) + "".join(map(_letter, json.dumps(name) if self.quoted else name))

    def items(self, text: str, first: str = "") -> str:
        """Return a part of a call as items of a rule, with any spaces that JSON allows. first: a pattern before it."""
        items, place = list[str](), 0
        for found in [*self.tags.finditer(text), None]:
            part = first + _loose(text[place : found.start() if found else len(text)])
            items += [f"/{part}/"] if part else []
            first = ""
            if found is not None:
                tag, place = found[0], found.end()
                items.append(f"<[{self.special[tag]}]>" if tag in self.special else json.dumps(tag))
        return " ".join(items)

    def rules(self, held: str) -> list[str]:
        """Return the rules of an answer in which calls may stand. `held` are those that are held to grammars; all else
        behind an opening tag is FREE."""
        if self.opens not in self.special:
            tag = json.dumps(self.opens)
            again = [f"begun[lazy]: TEXT {tag}", f"again[lazy]: FREE {tag}"]
            return ["start: TEXT | begun after", f"after: ({held}) start | FREE | again after", *again]
        on = {f"<[{number}]>": "after" if tag == self.opens else "start" for tag, number in self.special.items()}
        ends = ["", *(f" {tag} {then}" for tag, then in on.items())]
        text, free = (" | ".join(kind + end for end in ends) for kind in ("TEXT", "FREE"))
        return [f"start: {text}", f"after: ({held}) start | {free}"]


def free_calls(body: ChatBody, tokenizer: Tokenizer, forms: Forms) -> Grammar | None:
    """Return the grammar of an answer that may call tools, of which those in `body.held` have inputs by their grammars;
    None if there are none, or the model's form of calls has no such grammar."""
    shape = _Shape.of(tokenizer, forms)
    if not body.held or shape is None:
        return None
    lines, others = list[str](), [f"/{ANY}/"]
    for place, (name, held) in enumerate(body.held.items()):
        begun = shape.begun(name)
        others.append(f"~/{begun}{_loose(shape.behind[:1])}{ANY}/")
        before = shape.items(f'{shape.behind}{{"{INPUT}": ', begun)
        lines += [f"h{place}: {before} h{place}_v {shape.items('}' + shape.tail)}", _named(f"h{place}_v", held)]
    rules = shape.rules(" | ".join(f"h{place}" for place in range(len(body.held))))
    return Grammar(kind="grammar", text="\n".join([f"TEXT: /{ANY}/", f"FREE: {' & '.join(others)}", *rules, *lines]))


def _loose(text: str) -> str:
    """Return the pattern of a fixed text, with any spaces around what JSON puts between names and values."""
    parts = re.split(r"(\$INDEX|\s*[{}:,]\s*|\s+)", text)
    return "".join(_part(part) for part in parts)


def _part(text: str) -> str:
    if text == "$INDEX":
        return "[0-9]{1,2}"
    if not text.strip():
        return SPACE if text else ""
    bare = text.strip()
    if len(bare) == 1 and bare in "{}:,":
        return f"{SPACE}{_letter(bare)}{SPACE}"
    return "".join(map(_letter, text))


def _letter(character: str) -> str:
    return literal(ord(character))
