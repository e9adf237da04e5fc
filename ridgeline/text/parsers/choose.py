"""The forms that a model writes: by name, or by what its chat template and its tokens say.

forms = choose("auto", "qwen3", templates, added)
reader = forms.reader(prompt, tools, calls=True)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.registry import Registry
from ridgeline.text.parsers.calls import Tools
from ridgeline.text.parsers.forms import Form, ReasoningForm, ToolForm
from ridgeline.text.parsers.reader import AnswerReader, Parser
from ridgeline.text.parsers.reasoning import REASONING_FORMS
from ridgeline.text.parsers.reasoning.think import ThinkParser
from ridgeline.text.parsers.tools import TOOL_FORMS
from ridgeline.text.parsers.tools.harmony import START, HarmonyParser
from ridgeline.text.parsers.tools.hermes import FORM as HERMES

AnyForm = TypeVar("AnyForm", bound=Form)


@dataclass(frozen=True)
class Forms:
    """The forms of a model's calls and reasoning. None is none that is known."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None

    @property
    def channels(self) -> bool:
        """True if one parser reads the whole answer."""
        return self.tools is HARMONY or (self.reasoning is not None and self.reasoning.channels)

    def forced(self, tools: Tools) -> ToolForm:
        """Return the form in which calls of these functions are forced."""
        form = self.tools
        if form is None or form.frame is None or not all(map(form.frame.says, tools.values())):
            return HERMES
        return form

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that must show, although they may be special tokens of the model."""
        reasoning = self.reasoning
        between = () if reasoning is None else (*reasoning.begins, *reasoning.ends, *reasoning.around)
        return (*(self.tools.tags if self.tools else ()), *(HARMONY.tags if self.channels else ()), *between)

    def switched(self, arguments: Mapping[str, object]) -> Forms:
        """Return the forms of a request with these arguments of the template, which may turn the reasoning off."""
        form = self.reasoning
        if form is None or not form.switch or arguments.get(form.switch) is not False:
            return self
        return replace(self, reasoning=replace(form, implied=False))

    def inside(self, prompt: str) -> bool | None:
        """Return True if the prompt ends within the reasoning, False if it ends behind it, and None if the model may
        begin it."""
        form, end = self.reasoning, prompt.rstrip()
        if form is None:
            return False
        if end.endswith(form.ends):
            return False
        begun = end.removesuffix(form.label).rstrip().endswith(form.begins)
        return True if form.implied or form.channels or begun else None

    def reader(
        self,
        prompt: str,
        tools: Tools,
        *,
        calls: bool,
        forced: bool = False,
        most: int | None = None,
        added: Collection[str] = (),
    ) -> AnswerReader:
        """Return the reader of one answer.

        prompt: the text that the answer continues.
        tools: the functions that the request offers.
        calls: calls are looked for.
        forced, most: as in `AnswerReader`.
        added: the tokens that the tokenizer knows as a whole.
        """
        form = (self.forced(tools) if forced else self.tools) if calls else None
        new_id = {} if form is None else {"new_id": form.new_id}
        if self.channels:
            head = prompt.rpartition(START)[2]
            harmony = HarmonyParser(tools, START + head, calls=calls, reasoning=self.reasoning is not None)
            return AnswerReader([harmony], most=most, forced=forced, **new_id)
        stages: list[Parser] = []
        inside = self.inside(prompt)
        if self.reasoning is not None and inside is not False:
            interrupts = [tag for tag in form.opens if tag in added] if form is not None else []
            stages.append(ThinkParser(self.reasoning, inside=bool(inside), interrupts=interrupts))
        if form is not None:
            stages.append(form.parser(tools))
        return AnswerReader(stages, most=most, forced=forced, **new_id)


HARMONY = TOOL_FORMS[0]


def choose(tools: str, reasoning: str, templates: Iterable[str], added: Collection[str]) -> Forms:
    """Return the forms by their names, or those that "auto" finds.

    templates: the sources of the model's chat templates.
    added: the tokens that the tokenizer knows as a whole.

    Raise InvalidConfig for an unknown name.
    """
    texts = list(templates)
    return Forms(
        _chosen("tool_call_parser", tools, TOOL_FORMS, texts, ()),
        _chosen("reasoning_parser", reasoning, REASONING_FORMS, texts, added),
    )


def _chosen(
    flag: str, name: str, forms: Sequence[AnyForm], templates: list[str], added: Collection[str]
) -> AnyForm | None:
    if name == "none":
        return None
    if name == "auto":
        return next((each for each in forms if _known(each.known_by, templates, added)), None)
    found = next((each for each in forms if name in (each.name, *each.aliases)), None)
    if found is not None:
        return found
    plugins = Registry(flag, {})
    if name in plugins:
        return _checked(plugins[name], type(forms[0]), flag, name)
    known = ", ".join(sorted(name for each in forms for name in (each.name, *each.aliases)))
    raise InvalidConfig(f"unknown {flag} {name!r}; use auto, none or one of {known}.")


def _checked(form: object, kind: type[AnyForm], flag: str, name: str) -> AnyForm:
    """Return a plugin's form. Raise InvalidConfig for another object."""
    if isinstance(form, kind):
        return form
    raise InvalidConfig(f"the {flag} {name!r} of a plugin is a {type(form).__name__}; it must be a {kind.__name__}.")


def _known(entries: Iterable[tuple[str, ...]], templates: list[str], added: Collection[str]) -> bool:
    """Return True if some entry's words all stand in one template, or are all tokens of the model."""
    return any(
        any(all(word in text for word in words) for text in templates)
        or (bool(added) and all(w in added for w in words))
        for words in entries
    )
