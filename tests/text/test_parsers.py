"""Forms of tool calls, each on texts as its model writes them: what is read is what was written, wherever it is cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.parsers.events import CallDelta, Content, Reasoning
from ridgeline.text.parsers.reader import AnswerReader, Parser
from ridgeline.text.parsers.tools import TOOL_FORMS

Read = tuple[str, str, list[tuple[str, str, str | None]]]  # reasoning, content, and each call's name, arguments and id

SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
        "fresh": {"type": "boolean"},
        "filter": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "day": {"type": ["string", "null"]},
        "page": {"$ref": "#/$defs/page"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "free": {},
    },
    "$defs": {"page": {"type": "integer"}},
}
TOOLS: dict[str, Any] = {"search": SEARCH, "now": {"type": "object", "properties": {}}}
FORMS = {form.name: form for form in TOOL_FORMS}
QUERY = '<b>"São\n\\Paulo" 😀</b>'
ARGS = json.dumps({"query": QUERY, "limit": 3}, ensure_ascii=False)
S, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
C, B, D = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
K, L = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
PLAIN = "It <b>rains</b> [1], {2} and `x` <to"


def joined(parser: Parser, pieces: list[str]) -> Read:
    """Everything joined, as a client joins it."""
    reasoning, content, calls = "", "", dict[int, tuple[str, str, str | None]]()
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        match event:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case CallDelta(index, name, arguments, call_id):
                assert (name is not None) == (index not in calls), "a name comes once, and first"
                before = calls.get(index, (name or "", "", call_id))
                calls[index] = before[0], before[1] + arguments, before[2]
    assert list(calls) == list(range(len(calls)))
    assert parser.finish() == []
    return reasoning, content, list(calls.values())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def xml(*arguments: tuple[str, str]) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)


def glm(*arguments: tuple[str, str]) -> str:
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)


def m2(*arguments: tuple[str, str]) -> str:
    return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)


def dsml(tag: str) -> str:
    mark = "｜DSML｜"
    typed = (("query", "true", QUERY), ("limit", "false", "3"), ("either", "true", "12"))
    parameters = "".join(
        f'<{mark}parameter name="{key}" string="{kind}">{value}</{mark}parameter>\n' for key, kind, value in typed
    )
    search = f'<{mark}invoke name="search">\n{parameters}</{mark}invoke>\n'
    return f'<{mark}{tag}>\n{search}<{mark}invoke name="now">\n</{mark}invoke>\n</{mark}{tag}>'


TYPED = [
    ("query", QUERY), ("limit", "3"), ("ratio", "1e-3"), ("fresh", "true"), ("filter", '{"a": [1, null]}'),
    ("tags", '["x", "y"]'), ("day", "null"), ("page", "7"), ("either", "12"), ("free", "5"), ("other", "007"),
]  # fmt: skip
TYPED_VALUES = {
    "query": QUERY, "limit": 3, "ratio": 0.001, "fresh": True, "filter": {"a": [1, None]}, "tags": ["x", "y"],
    "day": None, "page": 7, "either": 12, "free": 5, "other": "007",
}  # fmt: skip
ODD = [("limit", "three"), ("fresh", "True"), ("filter", "{'a': None}"), ("day", "12"), ("query", "null")]
ODD_VALUES = {"limit": "three", "fresh": True, "filter": {"a": None}, "day": "12", "query": "null"}
ONE = [("search", {"query": QUERY, "limit": 3})]
TWO = [*ONE, ("now", {})]

SAID = f'{{"name": "search", "arguments": {ARGS}}}'
MEANT = f'{{"name": "search", "parameters": {ARGS}}}'
NOW = '{"name": "now", "arguments": {}}'
BOTH = f"[search(query={QUERY!r}, limit=3), now()]"
LINES = f"search(query={QUERY!r}, limit=3)\nnow()\n"
LITERALS = "[search(query='a', tags=[\"x\", 'y)'], fresh=True, day=null, filter={'a': (1)})]"
MEANS = {"query": "a", "tags": ["x", "y)"], "fresh": True, "day": None, "filter": {"a": 1}}
FENCED = f"{C}function{B}search\n```json\n{ARGS}\n```{D}\n{C}function{B}now\n```json\n{{}}\n```{D}"
COUNTED = (
    f"<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
)
ODD_XML = f"<tool_call><function=search>{xml(*ODD)}</function></tool_call>\n"
NOW_XML = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
BARE_XML = f"<function=search>\n{xml(('query', QUERY), ('limit', '3'))}</function>\n</tool_call>"
INVOKED = f'<invoke name="search">\n{m2(*TYPED)}</invoke>\n<invoke name="now">\n</invoke>\n'
MESSAGES = (
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
    f"<|constrain|>json<|message|>{ARGS}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>"
)
OPEN_ENDED = "<parameter=query>\nhi\n<parameter=limit>\n3\n"  # neither has its end
UNCLOSED_M2 = '<parameter name="query">hi<parameter name="limit">3'
UNCLOSED_GLM = "<arg_key>query</arg_key>\n<arg_value>hi<arg_key>limit</arg_key><arg_value>3"
UNCLOSED, NOW_CALL = ("search", {"query": "hi", "limit": 3}), ("now", {})
TAGGED = "say </parameter> and </function> or </tool_call> <parameter=no> here"  # tags, but none that ends anything
GEMMA = '{query:<|"|>São {x}, "y"\n<|"|>,limit:3,filter:{a:[1,<|"|>b<|"|>,true],<|"|>c d<|"|>:null},day:mon}'
GEMMAS = [
    ("search", {"query": 'São {x}, "y"\n', "limit": 3, "filter": {"a": [1, "b", True], "c d": None}, "day": "mon"}),
    NOW_CALL,
]
CALL_TAG, CALL_END = "<|tool_call>", "<tool_call|>"
UNENDED = CALL_TAG + 'call:search{tags:[<|"|>x<|"|>,{a:2'
LIMITED, NESTED = ("search", {"limit": 1}), ("search", {"tags": ["x", {"a": 2}]})
QUOTED = {"query": 'v, "w"\n\\', "y z": {"k": "{1}]", "": [1, "<b>"]}, "limit": 1}
HALF_QUOTED = {"query": "a\nb", "day": '"a" or "b"', "free": '5"'}
NO_NUMBERS = [("tags", "[NaN, 1]"), ("filter", '{"a": -Infinity}'), ("ratio", "NaN")]
STRAY = f"{xml(('query', 'a.txt'))}Now the day:\n{xml(('day', 'x'))}"
STRAY_M2 = f"{m2(('query', 'a.txt'))}Now the day: {m2(('day', 'x'))}"
READ_PAST = ("search", {"query": "a.txt", "day": "x"})
SAID_BOTH = [("search", {"query": QUERY, "limit": 3, "either": "12"}), NOW_CALL]
ALL_TYPED, ALL_ODD = ("search", TYPED_VALUES), ("search", ODD_VALUES)

# form, text, content, calls
M = "]<]minimax[>["
NESTED_M3 = (
    f"{M}<filter>{M}<a>1{M}</a>{M}<b>{M}<c>x{M}</c>{M}</b>{M}</filter>\n"
    f"{M}<tags>{M}<item>u{M}</item>{M}<item>v{M}</item>{M}</tags>{M}<limit>2{M}</limit>"
)
HALVED = ("search", {"free": "\ufffd"})
LIMITED_TWO = ("search", {"limit": 2})
FUNCTION_GEMMA = (
    f"<start_function_call>call:search{GEMMA}<end_function_call><start_function_call>call:now{{}}<end_function_call>"
).replace('<|"|>', "<escape>")
COMMANDED = (
    f'{{"tool_call_id": "0", "tool_name": "search", "parameters": {ARGS}}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
)


def step3(*pairs: tuple[str, str]) -> str:
    begun = "<｜tool_call_begin｜>function<｜tool_sep｜>"
    parts = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in pairs)
    search = f'{begun}<steptml:invoke name="search">{parts}</steptml:invoke><｜tool_call_end｜>'
    now = f'{begun}<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜>'
    return f"<｜tool_calls_begin｜>{search}{now}<｜tool_calls_end｜>"


def m3(*pairs: tuple[str, str]) -> str:
    parts = "".join(f"{M}<{key}>{value}{M}</{key}>" for key, value in pairs)
    calls = f'{M}<invoke name="search">{parts}{M}</invoke>\n{M}<invoke name="now">{M}</invoke>'
    return f"{M}<tool_call>\n{calls}\n{M}</tool_call>"


STEPPED = step3(*TYPED)
XLAM_NONE = f'See ```[1]``` or ```py\nx``` or [{{}}] [{{"name": 5}}] {NOW}'
GEMMA_TYPES = {"query": "07", "limit": 3, "free": 5}
LINES_WITHIN = {"query": "a\nb\0", "limit": 3}
WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"Well.\n<tool_call>\n{SAID}\n</tool_call>", "Well.\n", ONE),
    ("hermes", f'<tool_call>{SAID}</tool_call><tool_call>{{"name": "now"}}</tool_call> ok', "ok", TWO),
    ("llama3_json", MEANT, "", ONE),
    ("llama3_json", f'<|python_tag|>{MEANT}; {{"name": "now", "parameters": {{}}}}', "", TWO),
    ("llama3_json", f'Sure. <|python_tag|>{{"type": "function", {MEANT[1:]}', "Sure. ", ONE),
    ("llama3_json", '{"answer": 5} and so on', '{"answer": 5} and so on', []),
    ("pythonic", BOTH, "", TWO),
    ("pythonic", LITERALS, "", [("search", MEANS)]),
    ("pythonic", f"<|python_start|>[search({QUERY!r}, limit=3)]<|python_end|>", "", ONE),
    ("pythonic", "[see(1)] says more", "[see(1)] says more", []),
    ("pythonic", "[1] says more", "[1] says more", []),
    ("olmo3", f"Hm.<function_calls>\n{LINES}</function_calls>", "Hm.", TWO),
    ("olmo3", "<function_calls>search(fresh=true)</function_calls>", "", [("search", {"fresh": True})]),
    ("mistral", f"[TOOL_CALLS][{SAID}, {NOW}]", "", TWO),
    ("mistral", f'Hm [TOOL_CALLS] [{SAID[:-1]}, "id": "abcdefghi"}}]', "Hm ", ONE),
    ("mistral", f"Hm[TOOL_CALLS]search{ARGS}[TOOL_CALLS]now{{}}", "Hm", TWO),
    ("mistral", f"[TOOL_CALLS]search[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{{}}", "", TWO),
    ("mistral", f"[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{ARGS}", "", ONE),
    ("deepseek_v3", f"Hm{S}{FENCED}{E}", "Hm", TWO),
    ("deepseek_v31", f"Hm{S}{C}search{B}{ARGS}{D}{C}now{B}{{}}{D}{E}", "Hm", TWO),
    ("kimi_k2", f"Hm{K}{COUNTED}{L}", "Hm", TWO),
    ("granite", f"<|tool_call|>[{SAID}, {NOW}]", "", TWO),
    ("granite", f"<tool_call> {SAID}", "", ONE),
    ("minimax", f"Hm<tool_calls>\n{SAID}\n{NOW}\n</tool_calls>", "Hm", TWO),
    ("minimax", f"Hm<tool_calls>[{SAID}, {NOW}]</tool_calls>", "Hm", TWO),
    ("qwen3_coder", f"Hm\n<tool_call>\n<function=search>\n{xml(*TYPED)}</function>\n</tool_call>", "Hm\n", [ALL_TYPED]),
    ("qwen3_coder", ODD_XML + NOW_XML, "", [ALL_ODD, ("now", {})]),
    ("qwen3_coder", BARE_XML, "", ONE),
    ("qwen3_coder", "<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
    (
        "glm45",
        f"Hm\n<tool_call>search\n{glm(*TYPED)}</tool_call>\n<tool_call>now\n</tool_call>",
        "Hm\n",
        [ALL_TYPED, ("now", {})],
    ),
    ("glm45", f"<tool_call>search{glm(*ODD)}</tool_call>", "", [ALL_ODD]),
    (
        "minimax_m2",
        f"Hm\n<minimax:tool_call>\n{INVOKED}</minimax:tool_call>",
        "Hm\n",
        [ALL_TYPED, ("now", {})],
    ),
    (
        "minimax_m2",
        f'<minimax:tool_call><invoke name="search">{m2(*ODD)}</invoke></minimax:tool_call>',
        "",
        [ALL_ODD],
    ),
    ("granite", f"<|tool_call|>[{SAID}, {NOW}]<|/tool_call|> ok", "ok", TWO),  # Phi-4-mini
    ("qwen3_coder", f"<tool_call>\n<function=search>\n{OPEN_ENDED}</function>\n</tool_call>", "", [UNCLOSED]),
    ("qwen3_coder", f"<tool_call><function=search>\n{OPEN_ENDED}</tool_call>\n{NOW_XML}", "", [UNCLOSED, NOW_CALL]),
    (
        "minimax_m2",
        f'<minimax:tool_call><invoke name="search">{UNCLOSED_M2}</invoke></minimax:tool_call>',
        "",
        [UNCLOSED],
    ),
    ("glm45", f"<tool_call>search\n{UNCLOSED_GLM}</tool_call>", "", [UNCLOSED]),
    (
        "seed_oss",
        f"Hm\n<seed:tool_call>\n<function=search>\n{xml(*TYPED)}</function>\n</seed:tool_call>",
        "Hm\n",
        [ALL_TYPED],
    ),
    ("deepseek_v32", f"Hm\n\n{dsml('function_calls')}", "Hm\n\n", SAID_BOTH),
    ("deepseek_v4", f"Hm\n\n{dsml('tool_calls')}", "Hm\n\n", SAID_BOTH),
    ("lfm2", f"Hm.<|tool_call_start|>{BOTH}<|tool_call_end|>ok", "Hm.ok", TWO),
    ("lfm2", f"<|tool_call_start|>\n```python\n{LINES}```\n<|tool_call_end|>", "", TWO),
    ("lfm2", f"<|tool_call_start|>[{SAID}, {NOW}]<|tool_call_end|>", "", TWO),
    ("lfm2", BOTH, "", TWO),
    ("lfm2", "[see(1)] says more", "[see(1)] says more", []),
    ("lfm2", "<|tool_call_start|>no<|tool_call_end|>", "<|tool_call_start|>no<|tool_call_end|>", []),
    ("smollm3", f"Hm.<code>\n{LINES}</code>", "Hm.", TWO),
    ("nemotron_v2", f"Hm<TOOLCALL>[{SAID}, {NOW}]</TOOLCALL>", "Hm", TWO),
    ("longcat", f"Hm<longcat_tool_call>\n{SAID}\n</longcat_tool_call>", "Hm", ONE),
    ("functiongemma", f"Hm{FUNCTION_GEMMA}ok", "Hmok", GEMMAS),
    ("cohere_command3", f"Hm.<|START_ACTION|>[\n    {COMMANDED}\n]<|END_ACTION|>ok", "Hm.ok", TWO),
    ("cohere_command3", f'<|START_ACTION|>{{"tool_name": "search", "parameters": {ARGS}}}<|END_ACTION|>', "", ONE),
    ("apertus", f'Hm.<|tools_prefix|>[{{"search": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>ok', "Hm.ok", TWO),
    ("apertus", "<|tools_prefix|>[1]<|tools_suffix|>ok", "<|tools_prefix|>[1]<|tools_suffix|>ok", []),
    ("apertus", '<|tools_prefix|>[{"a": "b"}]<|tools_suffix|>', '<|tools_prefix|>[{"a": "b"}]<|tools_suffix|>', []),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_name": "now", "parameters": "oops"}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_name": "now", "parameters": "oops"}]<|END_ACTION|>',
        [],
    ),
    ("hermes", '<tool_call>{"arguments": null, "name": "now"}</tool_call>', "", [NOW_CALL]),
    (
        "hermes",
        '<tool_call>{"arguments": {"free": NaN}, "name": "search"}</tool_call>',
        "",
        [("search", {"free": "NaN"})],
    ),
    ("hermes", '<tool_call>{"arguments": {"free": "\\ud83d"}, "name": "search"}</tool_call>', "", [HALVED]),
    ("xlam", f'[{{"name": "see", "arguments": {{"a": 1}}}}, {NOW}]', "", [NOW_CALL]),
    (
        "minimax_m3",
        f'{M}<invoke name="search">{M}<query>a{M}</query>{M}<query>b{M}</query>{M}</invoke>',
        "",
        [("search", {"query": "a"})],
    ),
    ("internlm", f"Hm.<|action_start|><|plugin|>\n{SAID}<|action_end|>\n", "Hm.", ONE),
    ("step3", f"Hm\n{STEPPED}ok", "Hm\nok", [ALL_TYPED, ("now", {})]),
    ("xlam", f"[{SAID}, {NOW}]", "", TWO),
    ("xlam", f"```json\n[{SAID}, {NOW}]\n```", "", TWO),
    ("xlam", '[{"name": "Bob", "arguments": {}}] ok', '[{"name": "Bob", "arguments": {}}] ok', []),
    ("xlam", "[1] It rains.", "[1] It rains.", []),
    ("xlam", f"I look [1].\n[{SAID}, {NOW}] ok", "I look [1].\n ok", TWO),
    ("xlam", f"I look:\n```json\n[{SAID}]\n```\n[ {NOW}]", "I look:\n\n", TWO),
    ("xlam", XLAM_NONE, XLAM_NONE, []),
    ("xlam", f'[ {{ "a": 1}}]\n[{NOW}', '[ { "a": 1}]\n', [NOW_CALL]),
    ("step3", STEPPED.replace("function<｜tool_sep｜>", "") + "ok", "ok", [ALL_TYPED, NOW_CALL]),
    ("minimax_m3", f"Hm\n{m3(*TYPED)}ok", "Hm\nok", [ALL_TYPED, ("now", {})]),
    ("minimax_m3", f"{M}<tool_call>It rains.", f"{M}<tool_call>It rains.", []),
    (
        "minimax_m3",
        f'{M}<invoke name="search">{NESTED_M3}{M}</invoke>{M}</tool_call>',
        "",
        [("search", {"filter": {"a": "1", "b": {"c": "x"}}, "tags": ["u", "v"], "limit": 2})],
    ),
    (  # ends that are left out
        "minimax_m3",
        f'{M}<tool_call>{M}<invoke name="search">{M}<limit>2{M}</invoke>{M}<invoke name="now">{M}</tool_call>ok',
        "ok",
        [LIMITED_TWO, NOW_CALL],
    ),
    ("gemma4", f"Hm<|tool_call>call:search{GEMMA}<tool_call|><|tool_call>call:now{{}}<tool_call|>ok", "Hmok", GEMMAS),
    ("gemma4", "<|tool_call>search{}<tool_call|>", "<|tool_call>search{}<tool_call|>", []),
    ("gemma4", f"{CALL_TAG}call:search{{limit:1{CALL_END}{UNENDED}{CALL_END}tail", "tail", [LIMITED, NESTED]),
    ("gemma4", f"{UNENDED},c:{CALL_TAG}call:now{{}}{CALL_END}", "", [NESTED, NOW_CALL]),
    (
        "gemma4",
        f"{CALL_TAG}call:search{{tags:[{{a:1],limit:2}}{CALL_END}",
        "",
        [("search", {"tags": [{"a": 1}], "limit": 2})],
    ),
    (
        "gemma4",
        f"{CALL_TAG}call:search{{free:NaN,tags:[-Infinity]}}{CALL_END}",
        "",
        [("search", {"free": "NaN", "tags": ["-Infinity"]})],
    ),
    ("gemma4", f"{CALL_TAG}call:search{json.dumps(QUOTED)}{CALL_END}ok", "ok", [("search", QUOTED)]),
    (
        "gemma4",
        f'{CALL_TAG}call:search{{query:"a\nb",day:"a" or "b",free:5"}}{CALL_END}',
        "",
        [("search", HALF_QUOTED)],
    ),
    ("gemma4", f'{CALL_TAG}call:search{{query:"a{CALL_END}ok', "ok", [("search", {"query": '"a'})]),
    ("qwen3_coder", f"<tool_call>\n<function=search>\n{STRAY}</function>\n</tool_call>", "", [READ_PAST]),
    ("qwen3_coder", f"<tool_call>\n<function=search>\n{OPEN_ENDED}</function>\nDone", "Done", [UNCLOSED]),
    ("qwen3_coder", f"<tool_call>\n<function=search>\n{OPEN_ENDED}</tool_call>\nDone", "Done", [UNCLOSED]),
    (
        "qwen3_coder",
        f"<tool_call><function=search>\n{xml(*NO_NUMBERS)}</function></tool_call>",
        "",
        [("search", dict(NO_NUMBERS))],
    ),
    ("qwen3_coder", f"<tool_call>It rains.\n{NOW_XML}", "<tool_call>It rains.\n", [NOW_CALL]),
    ("seed_oss", f"<seed:tool_call>\n<function=search>\n{OPEN_ENDED}</seed:tool_call>\nDone", "Done", [UNCLOSED]),
    ("glm45", f"<tool_call>search\n{UNCLOSED_GLM}</tool_call> ok", "ok", [UNCLOSED]),
    ("glm45", f"<tool_call>search{glm(*NO_NUMBERS)}</tool_call>", "", [("search", dict(NO_NUMBERS))]),
    ("minimax_m2", f'<minimax:tool_call><invoke name="search">{UNCLOSED_M2}</minimax:tool_call> ok', "ok", [UNCLOSED]),
    (
        "minimax_m2",
        f'<minimax:tool_call><invoke name="search">{STRAY_M2}</invoke></minimax:tool_call>',
        "",
        [READ_PAST],
    ),
    ("lfm2", '[{"name": "Bob", "parameters": {"age": 3}}] ok', '[{"name": "Bob", "parameters": {"age": 3}}] ok', []),
    ("lfm2", f'[{NOW}, {{"age": 3, "name": "Bob"}}]', '{"age": 3, "name": "Bob"}]', [NOW_CALL]),
    ("lfm2", f"[{SAID}, {NOW}] ok", " ok", TWO),
    ("lfm2", "<|tool_call_start|>[now()] I will look.", "I will look.", [NOW_CALL]),
    ("lfm2", "<|tool_call_start|>[now()]] I will look. <|tool_call_end|> ok", "I will look.ok", [NOW_CALL]),
    ("lfm2", "<|tool_call_start|>[now(), see(b=1)]<|tool_call_end|>ok", "see(b=1)ok", [NOW_CALL]),
    ("lfm2", "<|tool_call_start|>\n```python\nnow()\nsee(b=1)\n```\n<|tool_call_end|>", "see(b=1)", [NOW_CALL]),
    ("hermes", f"<tool_call> is a tag. <tool_call>{NOW}</tool_call>", "<tool_call> is a tag. ", [NOW_CALL]),
    ("smollm3", "<code>now()\nsee(b=1)\n</code> ok", "\nsee(b=1)\nok", [NOW_CALL]),
    ("olmo3", "<function_calls>now()\n(It rains.)", "(It rains.)", [NOW_CALL]),
    # Granite 20B for functions and Phi-4-mini; a sentence before a call of Llama's.
    ("granite", f"Hm <function_call> {SAID}\n<function_call> {NOW}", "Hm ", TWO),
    ("granite", f"Hm functools[{SAID}, {NOW}]", "Hm ", TWO),
    ("granite", "functools [1] and functools[1]", "functools [1] and functools[1]", []),
    ("llama3_json", f"It is: {MEANT} So.", "It is: So.", ONE),
    ("llama3_json", 'See {"name": "Bob", "age": {}} or {"type', 'See {"name": "Bob", "age": {}} or {"type', []),
    # A word that is left out, and a number where the schema has strings alone.
    ("gemma4", "<|tool_call>:search{query:07,limit:3,free:5}<tool_call|>", "", [("search", GEMMA_TYPES)]),
    ("lfm2", "<|tool_call_start|>[search(query='a\nb\0', limit=03)]<|tool_call_end|>", "", [("search", LINES_WITHIN)]),
    ("lfm2", "<|tool_call_start|>[search(tags={'u', 'v'})]<|tool_call_end|>", "", [("search", {"tags": ["u", "v"]})]),
    ("openai", MESSAGES, "Let me see.", TWO),
    ("openai", "<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
]


def cuts_agree(parser: Any, text: str) -> Read:
    """The text read whole, which must be what is read in single characters and cut at each place."""
    whole = joined(parser(), [text])
    assert joined(parser(), list(text)) == whole
    for place in range(1, len(text)):
        assert joined(parser(), [text[:place], text[place:]]) == whole, place
    return whole


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    WRITTEN,
    ids=lambda value: value if isinstance(value, str) and len(value) < 14 else "",
)
def test_calls_are_those_that_the_model_wrote(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    reasoning, found, made = cuts_agree(lambda: FORMS[name].parser(TOOLS), text)
    assert (reasoning, found) == ("", content)
    assert [(name, json.loads(arguments)) for name, arguments, _ in made] == calls


DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="search">
<｜DSML｜parameter name="arguments" string="KIND">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("deepseek_v31", f'{S}{C}search{B}{{"arguments": {ARGS}}}{D}{E}', ARGS),
        ("deepseek_v3", f'{S}{C}function{B}search\n```json\n{{ "arguments":{ARGS} }}\n```{D}{E}', ARGS),
        ("deepseek_v31", f'{S}{C}search{B}{{"arguments": {ARGS}, "limit": 1}}{D}{E}', None),
        ("deepseek_v31", f'{S}{C}search{B}{{"arguments": {ARGS}{D}{E}', f'{{"arguments": {ARGS}'),
        ("deepseek_v31", f'{S}{C}search{B}{{"arguments": "a"}}{D}{E}', '{"arguments": "a"}'),
        ("deepseek_v31", f'{S}{C}search{B}{{"query": {{"arguments": {{}}}}}}{D}{E}', '{"query": {"arguments": {}}}'),
        ("deepseek_v31", f'{S}{C}other{B}{{"arguments": {ARGS}}}{D}{E}', f'{{"arguments": {ARGS}}}'),
        ("deepseek_v32", DSML.replace("KIND", "false").replace("VALUE", '{"limit": 3}'), '{"limit": 3}'),
        ("deepseek_v32", DSML.replace("KIND", "true").replace("VALUE", '{"limit": 3}'), '{"limit": 3}'),
        ("deepseek_v32", DSML.replace("KIND", "true").replace("VALUE", "a"), '{"arguments": "a"}'),
        ("deepseek_v32", DSML.partition("VALUE")[0].replace("KIND", "false"), '{"arguments": '),
    ],
)
def test_arguments_within_arguments_are_taken_out_where_nothing_else_can_be_meant(
    name: str, text: str, arguments: str | None
) -> None:
    """Only where the function is offered and has no argument of that name, and nothing stands beside it."""
    _, content, [(_, found, _)] = cuts_agree(lambda: FORMS[name].parser(TOOLS), text)
    assert content == ""
    assert found == (arguments or f'{{"arguments": {ARGS}, "limit": 1}}')


def test_quotes_within_a_string_of_pythons_may_lack_their_backslashes() -> None:
    text = """<|tool_call_start|>[search(query="echo "a\\tb" now", limit=3), now()]<|tool_call_end|>"""
    _, _, [(_, arguments, _), _] = cuts_agree(lambda: FORMS["lfm2"].parser(TOOLS), text)
    assert json.loads(arguments) == {"query": 'echo "a\tb" now', "limit": 3}


@pytest.mark.parametrize(
    "said",
    [
        'say "hi, you" (now)',
        'a "b", c "d" [e], {"f": 1}',
        "it's \"so\", isn't it",
        'run f("x"), then g("y")',
        'tail "end"',
        '"begin", and on',
        'print("a, b")  # \\"c\\"',
        'see <|tool_call_end|> "x", y',
        'a "b" , "c" ) "d"',
    ],
)
def test_quotes_that_lack_their_backslashes_may_stand_around_commas_and_brackets(said: str) -> None:
    meant = said.replace('\\"', '"')
    for head, tail in (("<|tool_call_start|>[", "]<|tool_call_end|>"), ("<|tool_call_start|>\n```python\n", "\n```")):
        text = f'{head}search(query="{said}", limit=3), search(limit=4, query="{said}"){tail}'
        _, content, made = cuts_agree(lambda: FORMS["lfm2"].parser(TOOLS), text)
        assert content == ""
        assert [json.loads(arguments) for _, arguments, _ in made] == [
            {"query": meant, "limit": 3},
            {"limit": 4, "query": meant},
        ]


def test_a_string_is_given_as_soon_as_its_end_is_known() -> None:
    """And what may stand behind a quote is looked for no further than 64 signs of white space."""
    parser = FORMS["lfm2"].parser(TOOLS)
    given = [len(parser.push(char)) for char in '<|tool_call_start|>[search(query="a", limit=3']
    assert given[-len('"a", limit=3') :].index(1) == len('"a", limit=') - 1
    blank = " " * 100_000
    text = f'<|tool_call_start|>[search(query="a"{blank}, limit=3", limit=4)]<|tool_call_end|>'
    _, _, [(_, arguments, _)] = joined(FORMS["lfm2"].parser(TOOLS), list(text))
    assert json.loads(arguments) == {"query": f'a"{blank}, limit=3', "limit": 4}


def test_a_tag_within_a_text_ends_it_only_if_something_that_may_follow_does() -> None:
    text = f"<tool_call><function=search>{xml(('query', TAGGED), ('limit', '3'))}</function></tool_call>ok"
    _, content, made = cuts_agree(lambda: FORMS["qwen3_coder"].parser(TOOLS), text)
    assert content == "ok"
    assert [json.loads(arguments) for _, arguments, _ in made] == [{"query": TAGGED, "limit": 3}]
    blank = " " * 100_000  # is looked at only so far
    text = (
        f"<tool_call><function=search>\n<parameter=query>\na</parameter>{blank}b\n</parameter></function></tool_call>"
    )
    _, _, made = joined(FORMS["qwen3_coder"].parser(TOOLS), list(text))
    assert [json.loads(arguments) for _, arguments, _ in made] == [{"query": f"a</parameter>{blank}b"}]


@pytest.mark.parametrize("text", ["? It rains, ", "It rains, ", '"a', "{1:2} ", "[1] ", "(x) "])
@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"openai"}))  # there a message has a tag behind its head
def test_what_proves_to_be_no_call_is_given_as_it_comes(name: str, text: str) -> None:
    form = FORMS[name]
    for tag in form.opens or ("",):
        parser, whole = form.parser(TOOLS), tag + text + "and so on. " * 40
        given = [event for char in whole for event in parser.push(char)]
        content = "".join(event.text for event in given if isinstance(event, Content))
        assert len(content) > 400, tag


def test_what_the_schema_knows_goes_before_what_the_model_says_of_a_type() -> None:
    """DeepSeek V3.2 says of each argument whether it is a string. `float` and `bool` are no types of JSON Schema."""
    types = {"n": "float", "b": "bool", "s": "string", "i": "integer", "u": ["string", "null"], "l": ["list", "null"]}
    tools = {"f": {"properties": {name: {"type": kind} for name, kind in types.items()}}}
    given = [
        *(("n", "true", "2.5"), ("b", "true", "true"), ("s", "false", "null"), ("i", "false", "-007")),
        *(("u", "false", "null"), ("l", "true", "[1]"), ("x", "true", "5"), ("y", "false", "5")),
    ]
    mark = "｜DSML｜"
    parts = [f'<{mark}parameter name="{key}" string="{said}">{text}</{mark}parameter>' for key, said, text in given]
    text = f'<{mark}tool_calls><{mark}invoke name="f">{"".join(parts)}</{mark}invoke></{mark}tool_calls>'
    _, content, [(_, arguments, _)] = cuts_agree(lambda: FORMS["deepseek_v4"].parser(tools), text)
    wanted = {"n": 2.5, "b": True, "s": "null", "i": -7, "u": None, "l": [1], "x": "5", "y": 5}
    assert (content, json.loads(arguments)) == ("", wanted)


def test_odd_schemas_of_tools_end_no_answer() -> None:
    text = f'{M}<invoke name="f">{M}<a>1{M}</a>{M}</invoke>'
    for schema in (
        {"anyOf": 5},
        {"properties": {"a": {"anyOf": 5, "oneOf": {}}}},
        {"properties": {"a": {"$ref": "#/x"}}},
    ):
        _, _, made = joined(FORMS["minimax_m3"].parser({"f": schema}), [text])
        assert [name for name, _, _ in made] == ["f"]


@pytest.mark.parametrize("name", FORMS)
def test_text_without_calls_is_content(name: str) -> None:
    assert cuts_agree(lambda: FORMS[name].parser(TOOLS), PLAIN) == ("", PLAIN, [])


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN, ids=[name for name, *_ in WRITTEN])
def test_a_text_that_breaks_off_has_the_beginning_of_its_calls(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    *_, whole = joined(FORMS[name].parser(TOOLS), [text])
    for end in range(len(text)):
        _, found, made = joined(FORMS[name].parser(TOOLS), [text[:end]])
        assert len(made) <= len(whole)
        for (function, arguments, _), (wanted, all_of_them, _) in zip(made, whole, strict=False):
            assert function == wanted
            assert all_of_them.startswith(arguments) or arguments == "{}"
        ways = (found[:n] for n in range(len(found) + 1) if text[:end].endswith(found[n:]))
        assert any(content.startswith(way) for way in ways), "content, and at most the start of the last call"


def test_calls_are_named_as_their_models_name_them() -> None:
    *_, calls = joined(FORMS["kimi_k2"].parser(TOOLS), [K + COUNTED + L])
    assert [call_id for *_, call_id in calls] == ["functions.search:0", "functions.now:1"]
    *_, calls = joined(FORMS["mistral"].parser(TOOLS), ["[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{}"])
    assert calls == [("search", "{}", "a1B2c3D4e")]
    for form in FORMS.values():
        reader = AnswerReader([form.parser(TOOLS)], new_id=form.new_id)
        text = next(text for name, text, _, calls in WRITTEN if name == form.name and calls)
        ids = [event.id for event in reader.read(text, ended=True) if isinstance(event, CallDelta) and event.name]
        assert all(ids)
        assert len(set(ids)) == len(ids)
        if form.name == "mistral":
            assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id or "") for call_id in ids)


def test_every_form_is_among_these_texts() -> None:
    assert {name for name, *_ in WRITTEN} == set(FORMS)


@settings(max_examples=400)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(FORMS)),
    places=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_what_is_broken_reads_the_same_however_it_is_cut(data: st.DataObject, name: str, places: list[int]) -> None:
    texts = [text for form, text, *_ in WRITTEN if form == name]
    spans = st.tuples(st.sampled_from(texts), st.integers(0, 400), st.integers(0, 400))
    parts = data.draw(
        st.lists(st.one_of(spans, st.sampled_from([*FORMS[name].tags, "{", "}", '"', "\n", "x"])), max_size=5)
    )
    text = "".join(part if isinstance(part, str) else part[0][min(part[1:]) : max(part[1:])] for part in parts)
    whole = joined(FORMS[name].parser(TOOLS), [text])
    assert joined(FORMS[name].parser(TOOLS), cut(text, places)) == whole
    assert joined(FORMS[name].parser(TOOLS), list(text)) == whole
