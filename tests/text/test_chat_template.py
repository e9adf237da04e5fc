"""Conversations are rendered as transformers renders them, refused in one sentence, and always in bounded time."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ridgeline.core.confined import Confined
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.text.chat_template import ChatTemplate, template_processes

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Functions:' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content | default('', true) | trim }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{ call.function | tojson(indent=2) }}{{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

HEADERS = """\
{{ bos_token }}
{%- macro header(role) -%}
<|start_header|>{{ role }}<|end_header|>{{ "\\n\\n" }}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{ header('system') }}Today: {{ strftime_now('%Y') }}
{{ system }}{{ eos_token }}
{% for m in rest %}
    {{ header(m['role']) }}{{ m['content'] | trim }}{{ eos_token }}
{%- if loop.last and add_generation_prompt %}{{ header('assistant') }}{% endif %}
{% endfor %}
"""

INSTRUCT = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('unknown role ' + message['role'] + '!') }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{%- for message in messages -%}
    {{ message.role }}:
    {%- if message.content is string %} {{ message.content }}
    {%- else %}{% for part in message.content if part.type == 'text' %} [{{ part['text'] }}]{% endfor %}
    {%- endif %};
{% endfor -%}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "parts": PARTS}

USER = {"role": "user", "content": "  Grüße <b>\"quoted\"</b> & 'x' 👋\n"}
REPLY = {"role": "assistant", "content": " fine, {{ no template }} "}
CONVERSATIONS = [[USER], [USER, REPLY, USER], [USER, REPLY]]
SYSTEM = {"role": "system", "content": " be brief "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "ü": [2.5, None]}}}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<sums> & more", "parameters": {}}}]


PROCESSES = template_processes()  # one start for all


@pytest.fixture(scope="session")
def oracle(folders: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(folders["byte_level"])


def assert_equal(oracle: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> None:
    ours = ChatTemplate(source, oracle.special_tokens_map, PROCESSES).render(messages, **options)
    options = {"add_generation_prompt": True, **options}
    assert ours == oracle.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equal_to_transformers(oracle: Any, template: str, messages: list[Any], add_generation_prompt: bool) -> None:
    assert_equal(oracle, TEMPLATES[template], messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("template", ["chatml", "headers", "parts"])
def test_equal_with_a_system_message(oracle: Any, template: str) -> None:
    assert_equal(oracle, TEMPLATES[template], [SYSTEM, USER])


def test_equal_with_tools_and_extra_keywords(oracle: Any) -> None:
    messages = [SYSTEM, USER, CALL, {"role": "tool", "content": "3"}]
    assert_equal(oracle, CHATML, messages, tools=TOOLS, enable_thinking=False)
    assert_equal(oracle, CHATML, messages, tools=[])


def test_equal_with_text_parts(oracle: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert_equal(oracle, PARTS, messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ documents is none }} {{ tools is none }} {{ missing }} {{ missing is defined }}",
        "{% for i in range(9) %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% for i in range(9) if i is odd %}{{ loop.index }}{{ i }}{% else %}none{% endfor %}",
        "{% set x %}a{{ 1 ~ none ~ 2.5 ~ messages[0].role ~ missing }}{% endset %}{{ x * 3 }}",
        "{{ 2 ** 10 }} {{ [1] + [2] }} {{ 3 * [none] }} {{ -2 * 'x' }} {{ 1700000000 | string }}",
        "{% set v = 1 %}{% generation %}{% set v = 2 %}{{ v }}{% endgeneration %}{{ v }}",
        "{% for a in [[1, [2]], [3]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
        "{{ {'b': 1, 'a': '<ü>'} | tojson(sort_keys=true, indent=1) }}",
        "{{ 'x' | center(5) }}{{ 'ab'.upper().ljust(4) }}|",
        "{{ '%s-%05d' % ('a', 42) }} {{ '{:>4}'.format(7) }} {{ 'a,b'.split(',') | join('+') }}",
        "{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
        "{{ m(1) }}{% call m(2) %}in{% endcall %}",
    ],
)
def test_the_language_is_unchanged(oracle: Any, source: str) -> None:
    assert_equal(oracle, source, [USER])


# What a request can get wrong


def test_text_parts_become_one_string_for_templates_that_expect_one() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    template = ChatTemplate(INSTRUCT, {"bos_token": "<s>"})
    assert template.render([message]) == "<s>[INST] one\ntwo [/INST]"
    assert message["content"] is parts


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        [],
        {"role": "user", "content": "x"},
        ["hi"],
        [None],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages.*\.$") as caught:
        ChatTemplate(CHATML, {}, PROCESSES).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("tools", ["add", [1], {"name": "add"}])
def test_malformed_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        ChatTemplate(CHATML, {}, PROCESSES).render([USER], tools=tools)


def test_the_template_may_refuse_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match=r"says: roles must alternate user/assistant\.$"):
        ChatTemplate(INSTRUCT, {}, PROCESSES).render([REPLY])


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path, {})
    assert not template.available
    with pytest.raises(InvalidRequest, match=r"no chat template.*plain prompt"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ missing.a.b }}",
        "{% include 'x' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ raise_exception.__globals__.os.system('true') }}",
    ],
)
def test_a_failing_template_ends_only_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}, PROCESSES).render([USER])


# Bounds


BOUNDS = {"seconds": 1.0, "memory": 64 << 20}
SHORT = Confined("ridgeline.text.sandbox:renderer", **BOUNDS)  # type: ignore[arg-type]


NESTED = "{% for a in range(99999) %}{% for b in range(99999) BODY %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED.replace("BODY", ""),
        NESTED.replace("BODY", "if false"),
        "{% set x %}" + NESTED.replace("BODY", "") + "{% endset %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(InvalidRequest, match="longer than 1 s"):
        ChatTemplate(source, {}, SHORT).render([USER])
    assert time.perf_counter() - begin < 60


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ range(10 ** 6) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:0999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ ('x' * 10 ** 5) | replace('x', 'y' * 10 ** 5) }}",
        "{{ range(10 ** 5) | join('x' * 10 ** 5) }}",
        "{{ lipsum(n=10 ** 6) }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[0]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set s = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
        "{% set s = 'x' * 10 ** 6 %}{% set t %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
    ],
)
def test_an_exploding_template_is_stopped(source: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}, SHORT).render([USER])
    assert time.perf_counter() - begin < 60


def test_threads_have_processes_of_their_own() -> None:
    source = "{% if messages[0].role == 'slow' %}" + NESTED.replace("BODY", "") + "{% endif %}ok"
    slow = ChatTemplate(source, {}, SHORT)
    refused: list[InvalidRequest] = []

    def run_slow() -> None:
        try:
            slow.render([{"role": "slow", "content": ""}])
        except InvalidRequest as error:
            refused.append(error)

    thread = threading.Thread(target=run_slow)
    thread.start()
    assert all(slow.render([USER]) == "ok" for _ in range(20))
    thread.join()
    assert len(refused) == 1


DOUBLED = "{% set n = namespace(s=[]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ ('x' * 1000).replace('x', 'y' * 8000000) }}",
        DOUBLED + "{{ n.s | tojson }}",
        DOUBLED + "{{ n.s | pprint }}",
        DOUBLED + "{{ n.s | string }}",
        "{% set n = namespace(s=[]) %}{% for i in range(99) %}"
        "{% set n.s = n.s + ['x' * (8000000 + i)] %}{% endfor %}{{ n.s | length }}",
        "{{ range(99999) | map('string') | map('center', 8000000) | list | length }}",
    ],
)
def test_a_single_step_is_bounded_too(source: str) -> None:
    """In time and in memory; and the next request is served."""
    begin, template = time.perf_counter(), ChatTemplate(source, {}, SHORT)
    with pytest.raises(InvalidRequest, match=r"was stopped: it (took longer|needed more|ended)|a value larger than"):
        template.render([USER])
    assert time.perf_counter() - begin < 10
    assert ChatTemplate(INSTRUCT, {"bos_token": "<s>"}, SHORT).render([{"role": "user", "content": "x"}])


def test_a_template_learns_no_secrets_and_gets_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_API_KEY", "secret")
    processes = template_processes()
    ChatTemplate("x", {}, processes).render([USER])
    [child] = processes._idle
    pid = child._process.pid
    assert "secret" not in Path(f"/proc/{pid}/environ").read_text()
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max file size +0 +0", limits)
    assert re.search(r"Max address space +\d+ +\d+", limits)


def test_a_process_that_was_killed_is_replaced_and_none_outlives_its_owner() -> None:
    processes = template_processes()
    template = ChatTemplate("x", {}, processes)
    template.render([USER])
    first = processes._idle[0]._process
    first.kill()
    first.wait()
    assert template.render([USER]) == "x"
    second = processes._idle[0]._process
    assert second.pid != first.pid
    del processes, template
    gc.collect()
    assert second.poll() is not None


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be JSON"):
        ChatTemplate("{{ f }}", {}, PROCESSES).render([USER], f=object())


def test_every_character_survives() -> None:
    text = "a\ud800\x00\u2028\U0001f600"
    assert ChatTemplate("{{ messages[0].content }}", {}, PROCESSES).render([{"role": "user", "content": text}]) == text


# Where templates are found


def folder_with(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": "config"})
    folder = folder_with(tmp_path, tokenizer_config__json=config, chat_template__json='{"chat_template": "json"}')
    assert ChatTemplate.from_folder(folder, {}).render([USER]) == "config"
    folder_with(folder, chat_template__jinja="file")
    assert ChatTemplate.from_folder(folder, {}).render([USER]) == "file"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert ChatTemplate.from_folder(folder, {}).render([USER]) == "json"


def test_named_templates_are_chosen_by_the_request(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(folder, {})
    assert (template.render([USER]), template.render([USER], tools=TOOLS)) == ("plain", "tools")


def test_additional_template_files_are_named_by_file(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    folder_with(tmp_path / "additional_chat_templates", tool_use__jinja="tools")
    template = ChatTemplate.from_folder(folder_with(tmp_path, chat_template__jinja="plain"), {})
    assert (template.render([USER]), template.render([USER], tools=TOOLS)) == ("plain", "tools")


def test_no_default_among_named_templates_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="rag"):
        ChatTemplate({"rag": "x"}, {}).render([USER])


@pytest.mark.parametrize("entry", [3, [1, 2], [{"name": "default"}], {"default": 1}])
def test_a_damaged_template_entry_is_named(tmp_path: Path, entry: object) -> None:
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps({"chat_template": entry}))
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(folder, {})
