"""Other APIs' conversations as messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.serving.apis.anthropic.bodies import CountMessagesBody, chat_of
from ridgeline.serving.apis.openai.response_bodies import messages_of
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.bounded_json import Size
from ridgeline.serving.requests.validation import _plain_call, _switches, parse
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.parsers.choose import Forms

CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
FUNCTION = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
FIRST_ONLY += "{% endif %}{{ m.content }}{% endfor %}"
IGNORING = "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"


def said(role: str, text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def of_anthropic(*turns: Any, later: bool = True, **more: Any) -> tuple[list[dict[str, Any]], list[str]]:
    body = parse(CountMessagesBody, {"messages": list(turns), **more})
    chat, ignored = chat_of(body, Forms(), later=later)
    return [message.model_dump(exclude_unset=True) for message in chat.messages], ignored


def test_parts_of_an_answer_are_one_message_as_long_as_they_come_in_order() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    told = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    result = {"type": "function_call_output", "call_id": "a", "output": "3"}
    calls = [FUNCTION | {"function": {"name": "f", "arguments": '{"x": 1}'}}]
    found = messages_of([said("user", "?"), thought, told, CALL, CALL, result, told, thought, told])
    assert found == [
        said("user", "?"),
        said("assistant", "I look.", reasoning_content="hm", tool_calls=calls * 2),
        said("tool", "3", tool_call_id="a"),
        said("assistant", "I look."),
        said("assistant", "I look.", reasoning_content="hm"),
    ]
    assert messages_of([CALL])[0]["content"] is None


def test_blocks_of_anthropics_messages_are_the_same_messages() -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "3", "is_error": True}
    found, _ = of_anthropic(
        said("user", "?"),
        {
            "role": "assistant",
            "content": [thought, {"type": "text", "text": "I"}, {"type": "text", "text": "look."}, use],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "So"}, {"type": "text", "text": "?"}]},
        said("user", "Well?"),
        system="Be brief.",
    )
    assert found == [
        said("system", "Be brief."),
        said("user", "?"),
        said("assistant", "I\nlook.", reasoning_content="hm", tool_calls=[FUNCTION]),
        said("tool", "3", tool_call_id="a", is_error=True),
        said("user", "So\n?\nWell?"),
    ]


def test_instructions_at_the_beginning_are_one_message_and_later_ones_stay_or_fold() -> None:
    turns = [said("system", "B"), said("user", "C"), said("system", "D"), said("assistant", "E"), said("system", "F")]
    turns.append(said("user", "G"))
    kept, _ = of_anthropic(*turns, system="A")
    assert kept == [said("system", "A\nB"), *turns[1:]]
    folded, _ = of_anthropic(*turns, system="A", later=False)
    assert folded == [said("system", "A\nB"), said("user", "C\nD"), said("assistant", "E"), said("user", "F\nG")]
    items = [said("developer", "A"), said("user", "B"), CALL, {"type": "function_call_output", "call_id": "a"}]
    items[-1]["output"] = "3"
    items.append(said("developer", "C"))
    assert messages_of(items, "I", later=False)[-1] == said("tool", "3\nC", tool_call_id="a")
    assert messages_of(items, "I")[:2] == [said("system", "I"), said("developer", "A")]


def test_a_template_is_tried_with_instructions_within_a_conversation() -> None:
    shows = {source: ChatTemplate(source, {}).shows_later_systems for source in (ANYWHERE, FIRST_ONLY, IGNORING)}
    assert shows == {ANYWHERE: True, FIRST_ONLY: False, IGNORING: False}
    assert not ChatTemplate(None, {}).shows_later_systems


def test_many_parts_are_joined_in_linear_time() -> None:
    """A megabyte in 4096 parts, in each of which all before it must not be copied."""
    blocks = [{"type": "text", "text": "x" * 4096}] * 4096
    [message], _ = of_anthropic({"role": "user", "content": blocks})
    assert len(message["content"]) == 4096 * 4097 - 1
    with pytest.raises(BadRequest, match="at most 4096"):
        of_anthropic({"role": "user", "content": [*blocks, blocks[0]]})


def test_what_anthropics_own_tools_did_is_left_out_by_name() -> None:
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    used = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "f"}, {"type": "new_part"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    turns = [
        said("user", "?"),
        {"role": "assistant", "content": [*searched, {"type": "new_block"}, {"type": "text", "text": "So."}, used]},
    ]
    messages, ignored = of_anthropic(*turns, {"role": "user", "content": [result]}, tools=tools)
    assert [message["content"] for message in messages] == [
        *("?", "So."),
        "f\n[new_part: left out, because this server does not know it]",
    ]
    wanted = {"tools.web_search_20250305", "server_tool_use", "web_search_tool_result", "new_block"}
    wanted.add("tool_result.new_part")
    assert set(ignored) == wanted


def test_a_template_that_asks_whether_there_is_content_is_answered() -> None:
    """DeepSeek's first templates write calls only where a content is none."""
    source = (
        "{% for m in messages %}{% if m['content'] is none %}<call>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [FUNCTION]}
    assert ChatTemplate(source, {}).render([said("user", "x"), call]) == "x<call>"


@pytest.mark.parametrize("content", [None, [], "missing"])
def test_missing_content_beside_calls_is_empty_text_to_every_template(content: Any) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    call = {"role": "assistant", "tool_calls": [FUNCTION]}
    call |= {} if content == "missing" else {"content": content}
    assert template.render([said("user", "x"), call]) == template.render([said("user", "x"), call | {"content": ""}])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"q": "x', {"q": "x"}),
        ('{"q": "x", "n": ', {"q": "x"}),
        ('{"q": "a\nb\\"', {"q": 'a\nb"'}),
        ('{"q": [1, {"r": "s', {"q": [1, {"r": "s"}]}),
        ('{\n  "q": "x\ty",\n  "n": 1', {"q": "x\ty", "n": 1}),
        ("{}trailing", {}),
        ("not json", {"arguments": "not json"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ("null", {}),
        ("", {}),
    ],
)
def test_arguments_that_were_cut_off_do_not_end_a_conversation(text: str, meant: Any) -> None:
    call = _plain_call({"function": {"name": "f", "arguments": text}}, 0, Size())
    assert call["function"]["arguments"] == meant


@pytest.mark.parametrize(
    ("source", "effort", "switches"),
    [
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ thinking }}", "high", {"thinking": True}),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "none", {}),
        ("{{ enable_thinking }}", None, {}),
        ("", "high", {}),
    ],
)
def test_an_effort_turns_thinking_on_and_off_where_a_template_knows_nothing_else(
    source: str, effort: str | None, switches: dict[str, bool]
) -> None:
    body = parse(ChatBody, {"messages": [said("user", "x")], "reasoning_effort": effort})
    assert _switches(ChatTemplate(source, {}), body) == switches
