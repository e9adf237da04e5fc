"""Templates with the structure of published ones: they render, tell the model's forms, and what they make of earlier
calls is what the chosen parser reads (templates/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.text.chat_template import ChatTemplate, template_processes
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.text.parsers.events import CallDelta

FOLDER = Path(__file__).parent / "templates"
# file → parser of calls, of reasoning, and whether the prompt ends within the reasoning, by default and without it
SHAPES: dict[str, tuple[str | None, str | None, bool | None, bool | None]] = {
    "chatml_think": ("hermes", "think", None, False),
    "functions_in_tags": ("qwen3_coder", None, False, False),
    "keys_and_values": ("glm45", "think", None, False),
    "fenced": ("deepseek_v3", "think", True, True),
    "separated": ("deepseek_v31", "think", False, False),
    "sections": ("kimi_k2", None, False, False),
    "declared": ("kimi_k2", None, False, False),
    "namespaced": ("minimax_m2", "think", True, True),
    "lines": ("minimax", None, False, False),
    "listed": ("minimax", None, False, False),
    "bracketed": ("mistral", "mistral", None, None),
    "behind_a_tag": ("granite", "granite", None, None),
    "python": ("olmo3", None, False, False),
    "channels": ("openai", "openai_gptoss", True, True),
    "seed": ("seed_oss", "seed_oss", None, None),
}
FIELDS = {"city": {"type": "string"}, "days": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
]
CALLS: list[dict[str, Any]] = [{"city": "Oslo", "days": 3}, {"city": "Aix-en-Provence"}]
IDS = ["functions.weather:0", "functions.weather:1"]
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it raining?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in zip(IDS, CALLS, strict=True)
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": name, "name": "weather", "content": text}
    for name, text in zip(IDS, ("It rains.", "It does not."), strict=True)
]
PROCESSES = template_processes()


def template(name: str) -> ChatTemplate:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), special, PROCESSES)


def forms_of(name: str) -> Forms:
    return choose("auto", "auto", template(name).sources, ())


def test_every_template_is_listed_and_told_of() -> None:
    files = {path.stem for path in FOLDER.glob("*.jinja")}
    assert files == SHAPES.keys()
    assert all(f"`{name}.jinja`" in (FOLDER / "README.md").read_text() for name in files)


@pytest.mark.parametrize("name", SHAPES)
def test_a_template_chooses_the_models_parsers(name: str) -> None:
    tools, reasoning, by_default, without = SHAPES[name]
    forms = forms_of(name)
    assert (forms.tools and forms.tools.name, forms.reasoning and forms.reasoning.name) == (tools, reasoning)
    for thinks, inside in ((None, by_default), (False, without)):
        more = {} if thinks is None else {"enable_thinking": thinks}
        assert forms.inside(template(name).render([SYSTEM, ASKED], True, TOOLS, **more)) is inside
    if name == "separated":
        assert forms.inside(template(name).render([SYSTEM, ASKED], True, TOOLS, thinking=True)) is True


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_template_makes_of_earlier_calls_is_what_the_parser_reads(name: str) -> None:
    """The model writes as its template does. `declared` shows no calls."""
    before = template(name).render([SYSTEM, ASKED], False, TOOLS)
    prompt = template(name).render([SYSTEM, ASKED, CALLED], False, TOOLS)
    assert prompt.startswith(before)
    forms = forms_of(name)
    if name == "declared":
        return
    written = prompt.removeprefix(before)
    reader = forms.reader("</think>", {"weather": PARAMETERS}, calls=True)
    found: dict[int, tuple[str | None, str]] = {}
    for event in reader.read(written, ended=True):
        if isinstance(event, CallDelta):
            called, arguments = found.get(event.index, (event.name, ""))
            found[event.index] = called, arguments + event.arguments
    assert [(called, json.loads(arguments)) for called, arguments in found.values()] == [("weather", c) for c in CALLS]


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_goes_on_behind_the_results(name: str) -> None:
    turns = [SYSTEM, ASKED, CALLED, *RESULTS, {"role": "assistant", "content": "Only in Oslo."}, ASKED]
    prompt = template(name).render(turns, True, TOOLS)
    texts = ["Be brief.", "It rains.", "It does not.", "Only in Oslo.", "Is it raining?"]
    places = [prompt.index(texts[0]), *(prompt.index(text) for text in texts[1:4]), prompt.rindex(texts[4])]
    assert places == sorted(places)
