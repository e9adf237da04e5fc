"""Reasoning in answers: told apart from content, with its tokens counted, wherever the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.text.parsers.events import CallDelta, Content, Reasoning
from ridgeline.text.parsers.reasoning import REASONING_FORMS
from ridgeline.text.parsers.thinking import spellings, thinking_of
from ridgeline.text.parsers.tools import TOOL_FORMS
from ridgeline.text.token_stream import TokenStream
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL

THOUGHT, ANSWER = "It asks for <b>rain</b>.\n\nSo: </thin", "It rains. <think> is a tag."
ARGS = '{"city": "Oslo"}'
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>'
CALLED = f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>"
H = "<|start|>user<|message|>Hi<|end|><|start|>assistant"

GRANITE = f"Here is my thought process: {THOUGHT} Here's my response: {ANSWER}"

# parser of reasoning, of calls, prompt, text, reasoning, content, arguments of a call
READ = [
    ("qwen3", "none", "Hi", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", THOUGHT, ANSWER, ""),
    ("qwen3", "none", "Hi", f"\n<think>\n{THOUGHT}", THOUGHT, "", ""),
    ("think", "none", "Hi", f" {ANSWER}", "", f" {ANSWER}", ""),
    ("think", "none", "Hi", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", THOUGHT, ANSWER, ""),
    ("qwen3", "none", "Hi", f"{THOUGHT}\n</think>\n\n{ANSWER}", THOUGHT, ANSWER, ""),
    ("qwen3", "none", "Hi", "It was cut off", "It was cut off", "", ""),
    ("qwen3", "none", "Hi<think>\n", f"{THOUGHT}\n</think>\n\n{ANSWER}", THOUGHT, ANSWER, ""),
    ("qwen3", "none", "Hi<think>\n\n</think>\n\n", ANSWER, "", ANSWER, ""),
    ("deepseek_r1", "none", "Hi", f"{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER, ""),
    ("deepseek_r1", "none", "Hi", f"<think>{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER, ""),
    ("glm45", "hermes", "Hi", f"<think>{THOUGHT}</think>\n{HERMES}", THOUGHT, "", ARGS),
    ("qwen3", "hermes", "Hi<think>", f"{THOUGHT}\n{HERMES}", THOUGHT, "", ARGS),
    ("granite", "none", "Hi", GRANITE, THOUGHT, ANSWER, ""),
    ("granite", "none", "Hi", "Here is my answer", "", "Here is my answer", ""),
    ("ernie45", "none", "Hi", f"<think>{THOUGHT}</think>\n\n<response>\n{ANSWER}\n</response>\n", THOUGHT, ANSWER, ""),
    ("ernie45", "hermes", "Hi<think>", f"{THOUGHT}</think>\n\n{HERMES}\n", THOUGHT, "", ARGS),
    ("ernie45", "none", "Hi", f"{ANSWER} <response>", "", f"{ANSWER} <response>", ""),
    ("hunyuan_a13b", "none", "Hi", f"<think>\n{THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>", THOUGHT, ANSWER, ""),
    ("hunyuan_a13b", "none", "Hi", f"</think><answer>{ANSWER}</answer>", "", ANSWER, ""),
    ("deepseek_v4", "none", "Hi", f"\n</think>\n\n{ANSWER}", "", ANSWER, ""),
    ("deepseek_v4", "none", "Hi", f" </thin {ANSWER}", "", f" </thin {ANSWER}", ""),
    ("think", "hermes", "Hi", f"</think>\n{HERMES}", "", "", ARGS),
    ("step3p5", "none", "Hi", f"{THOUGHT}\n</think>\n{ANSWER}", THOUGHT, ANSWER, ""),
    ("cohere_command3", "none", "Hi", f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>{ANSWER}", THOUGHT, ANSWER, ""),
    ("mistral", "none", "Hi", f"[THINK]{THOUGHT}[/THINK]{ANSWER}", THOUGHT, ANSWER, ""),
    (
        "openai_gptoss",
        "openai",
        H,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
        THOUGHT,
        ANSWER,
        "",
    ),
    ("gpt_oss", "none", H, f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{CALLED}", THOUGHT, "", ARGS),
    ("gpt_oss", "none", H + "<|channel|>analysis<|message|>", f"{THOUGHT}<|end|>{CALLED}", THOUGHT, "", ARGS),
    ("none", "openai", H, f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{CALLED}", "", THOUGHT, ARGS),
    ("gpt_oss", "none", H, ANSWER, "", ANSWER, ""),
]


def joined(forms: Forms, prompt: str, pieces: list[str]) -> tuple[str, str, str, int]:
    reader = forms.reader(prompt, {"f": {}}, calls=True, added=("<tool_call>",))
    parts: dict[type, str] = {Reasoning: "", Content: "", CallDelta: ""}
    for place, piece in enumerate(pieces):
        tokens = [len(part) for part in piece.splitlines(keepends=True)]  # each line is a token here
        for event in reader.read(piece, ended=place == len(pieces) - 1, tokens=tokens):
            parts[type(event)] += event.arguments if isinstance(event, CallDelta) else event.text
    return parts[Reasoning], parts[Content], parts[CallDelta], reader.reasoning_tokens


@pytest.mark.parametrize(("reasoning", "tools", "prompt", "text", "thought", "content", "arguments"), READ)
def test_reasoning_is_told_apart_wherever_the_text_is_cut(
    reasoning: str, tools: str, prompt: str, text: str, thought: str, content: str, arguments: str
) -> None:
    forms = choose(tools, reasoning, [], ())
    assert joined(forms, prompt, [text])[:3] == (thought, content, arguments)
    assert joined(forms, prompt, list(text))[:3] == (thought, content, arguments)
    for place in range(1, len(text)):
        assert joined(forms, prompt, [text[:place], text[place:]])[:3] == (thought, content, arguments), place


WORDS = ["<think>", "</think>", "So", " it", " rains", ".", "\n", "\n\n", "<", "/", "think>", "<b>"]


@settings(max_examples=300)
@given(words=st.lists(st.sampled_from(WORDS), max_size=16), cuts=st.lists(st.integers(0, 16), max_size=4))
def test_tokens_of_reasoning_are_those_between_the_tags(words: list[str], cuts: list[int]) -> None:
    reader = choose("none", "deepseek_r1", [], ()).reader("Hi", {}, calls=False)
    ends = sorted({min(cut, len(words)) for cut in cuts} | {0, len(words)})
    spans = list(pairwise(ends)) or [(0, 0)]
    for start, end in spans:
        part = words[start:end]
        reader.read("".join(part), ended=end == len(words), tokens=list(map(len, part)))
    text = "".join(words)
    opened = len(text) - len(text.lstrip()) + len("<think>") if text.lstrip().startswith("<think>") else 0
    closed = text.find("</think>", opened)
    starts = [sum(map(len, words[:n])) for n in range(len(words))]
    assert reader.reasoning_tokens == sum(opened <= at and (closed < 0 or at < closed) for at in starts)


TEMPLATES = [
    ('{{ \'<|im_start|>\' }} <tool_call>{"name": …, "arguments": …}</tool_call>', "hermes", None),
    ("… '</think>' in content … <tool_call> …", "hermes", "think"),
    ("… <tool_call>\n<function=example> <parameter=p> … </think>", "qwen3_coder", "think"),
    ("… <tool_call>{function-name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value> </think>", "glm45", "think"),
    ("… <|tool_calls_section_begin|> …", "kimi_k2", None),
    ("… <｜tool▁calls▁begin｜> … '\\n```json\\n' … </think>", "deepseek_v3", "think"),
    ("… <｜tool▁calls▁begin｜><｜tool▁call▁begin｜> … </think>", "deepseek_v31", "think"),
    ("… '<minimax:tool_call>' … <invoke name= <parameter name= '<think>' '</think>'", "minimax_m2", "think"),
    ("… [TOOL_CALLS] … [THINK]", "mistral", "mistral"),
    ("… '<|tool_call|>' … Here is my thought process: …", "granite", "granite"),
    ("… <function_calls> …", "olmo3", None),
    ("… <tool_calls> …", "minimax", None),
    ("'<|tool_call>call:' + name … <tool_call|> … '<|channel>thought\n<channel|>'", "gemma4", "gemma4"),
    ("… '<|tool_call_start|>[' …", "lfm2", None),
    ("… <seed:tool_call>\n<function=…> <parameter=…> … <seed:think>", "seed_oss", "seed_oss"),
    ("… <｜DSML｜function_calls>\n<｜DSML｜invoke name= … </think>", "deepseek_v32", "think"),
    ("… <｜DSML｜tool_calls>\n<｜DSML｜invoke name= … </think>", "deepseek_v4", "think"),
    ("… <TOOLCALL>[…]</TOOLCALL> …", "nemotron_v2", None),
    ("… <longcat_tool_call> …", "longcat", None),
    ("… <|START_THINKING|> … <|START_ACTION|> …", "cohere_command3", "cohere_command3"),
    ("… <|inner_prefix|> … <|tools_prefix|> …", "apertus", "apertus"),
    ("… <|action_start|><|plugin|> …", "internlm", None),
    ("… <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name= …", "step3", None),
    ("… ]<]minimax[>[<tool_call> … <mm:think> …", "minimax_m3", "minimax_m3"),
    ("… <start_function_call>call:f …", "functiongemma", None),
    ("… make calls in a single JSON array: …", "xlam", None),
    ("… <think> … </think> … <response> … <tool_call> …", "hermes", "ernie45"),
    ("… xml_tools … <tool_call>{…}</tool_call> … python_tools … <code> …", "hermes", None),  # SmolLM3
    ("… [func_name1(params_name1=params_value1)] …", "pythonic", None),
    ('… {"name": function name, "parameters": dictionary of argument name and its value} …', "llama3_json", None),
    ("<|start|>assistant<|channel|>analysis<|message|> …", "openai", "openai_gptoss"),
    ("{{ messages[0].content }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_a_template_tells_the_forms(template: str, tools: str | None, reasoning: str | None) -> None:
    forms = choose("auto", "auto", ["{{ messages }}", template], ())
    assert (forms.tools and forms.tools.name, forms.reasoning and forms.reasoning.name) == (tools, reasoning)
    assert choose("none", "none", [template], ()) == Forms()


def test_a_request_may_turn_off_what_a_form_implies() -> None:
    forms = choose("none", "qwen3", [], ())
    for off, want in (
        ({}, (ANSWER, "")),
        ({"enable_thinking": True}, (ANSWER, "")),
        ({"enable_thinking": False}, ("", ANSWER)),
    ):
        events = forms.switched(off).reader("Hi", {}, calls=False).read(ANSWER, ended=True)
        told = ["".join(each.text for each in events if isinstance(each, kind)) for kind in (Reasoning, Content)]
        assert tuple(told) == want, off
    r1 = choose("none", "deepseek_r1", [], ())
    assert r1.switched({"enable_thinking": False}) is r1


def test_names_of_vllms_are_those_of_the_same_form_or_unknown() -> None:
    for name, ours in (("granite4", "hermes"), ("qwen3_json", "hermes"), ("qwen3_xml", "qwen3_coder")):
        forms = choose(name, "granite_thinking_parser", [], ())
        assert (forms.tools and forms.tools.name, forms.reasoning and forms.reasoning.name) == (ours, "deepseek_r1")
    with pytest.raises(InvalidConfig, match="gigachat3"):
        choose("gigachat3", "none", [], ())


def test_every_form_has_names_of_its_own() -> None:
    assert {tools for _, tools, _ in TEMPLATES} == {form.name for form in TOOL_FORMS if form.known_by} | {None}
    for forms in (TOOL_FORMS, REASONING_FORMS):
        names = [name for form in forms for name in (form.name, *form.aliases)]
        assert len(names) == len(set(names))
    with pytest.raises(InvalidConfig, match=r"tool_call_parser 'json'.*hermes"):
        choose("json", "auto", [], ())
    with pytest.raises(InvalidConfig, match=r"reasoning_parser 'x'.*qwen3"):
        choose("auto", "x", [], ())


def embedded(*added: str, special: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    tokens = [tokenizers.AddedToken(tag, special=special) for tag in added]
    backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    return Tokenizer(backend, {})


def test_special_tokens_show_where_a_reader_needs_them() -> None:
    tokenizer = embedded("[TOOL_CALLS]", "<|end|>")
    ids = tokenizer.encode("Hm[TOOL_CALLS]f{}<|end|>", add_special_tokens=False)
    needed = frozenset({tokenizer.added["[TOOL_CALLS]"]})
    for shown, text in ((frozenset[int](), "Hmf{}"), (needed, "Hm[TOOL_CALLS]f{}")):
        stream = TokenStream(tokenizer, [], skip_special_tokens=True, shown=shown)
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_the_engine_is_told_the_tokens_of_tags() -> None:
    tokenizer = embedded("<think>", "</think>")
    [form] = [form for form in REASONING_FORMS if form.name == "qwen3"]
    known = thinking_of(form, tokenizer, inside=False, budget=3, forced=False, may_stop=False)
    assert (known.begins, known.ends) == (((tokenizer.added["<think>"],),), ((tokenizer.added["</think>"],),))
    assert known.closing == known.ends[0]


@pytest.mark.parametrize("after", ["", "\n", "\n\n", " ", "It"])
@pytest.mark.parametrize("before", ["", "\n", ".", " so", ".\n"])
def test_a_tag_without_a_token_is_found_as_text_spells_it(before: str, after: str) -> None:
    tokenizer = embedded()
    ids = tuple(tokenizer.encode(f"It rains{before}</think>{after}", add_special_tokens=False))
    found = spellings("</think>", tokenizer)
    assert any(ids[n : n + len(way)] == way for way in found for n in range(len(ids)))
