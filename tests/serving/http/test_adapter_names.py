"""Adapters as model names of a server: every face takes them, and lists tell whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import NamedAdapter, named_adapters
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, Server, StartServer, engine_in_a_thread

pytest.importorskip("peft")

from tests import pooled_models
from tests.peft_adapters import PeftAdapter, save_random

TEXT = "def add(a, b):"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> NamedAdapter:
    return NamedAdapter("red", str(save_random(EMBEDDED_MODEL, tmp_path_factory.mktemp("adapter"))), "alias")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> NamedAdapter:
    """An adapter with a template of its own, which leaves out what roles there are."""
    folder = save_random(EMBEDDED_MODEL, tmp_path_factory.mktemp("spoken"), seed=2)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return NamedAdapter("blunt", str(folder), "alias")


@pytest.fixture(scope="module")
def server(
    adapter: NamedAdapter, spoken: NamedAdapter, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    socket = tmp_path_factory.mktemp("engine") / "socket"
    with (
        engine_in_a_thread(socket, adapters=(adapter, spoken), enable_lora=True),
        start_server(engine=socket, adapters=(adapter, spoken)) as running,
    ):
        yield running


def test_an_adapter_is_a_model_that_tells_its_parent(server: Server, adapter: NamedAdapter) -> None:
    listed = {each.id: each.model_dump() for each in server.client.models.list()}
    assert set(listed) == {MODEL, "alias", "red", "blunt"}
    assert (listed["red"]["parent"], listed["red"]["root"]) == ("alias", adapter.path)
    assert listed[MODEL]["parent"] is None
    assert server.client.models.retrieve("red").model_dump() == listed["red"]


def test_completions_and_chats_run_with_the_adapter_that_they_name(server: Server, adapter: NamedAdapter) -> None:
    with LLM(device="cpu", dtype="float32", enable_lora=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        named = LoRARequest("red", 1, adapter.path)
        texts = [
            llm.generate(TEXT, params, lora_request=each, use_tqdm=False)[0].outputs[0].text for each in (None, named)
        ]
    assert texts[0] != texts[1]
    for model, wanted in zip((MODEL, "red"), texts, strict=True):
        answer = server.client.completions.create(model=model, prompt=TEXT, max_tokens=8, temperature=0)
        assert (answer.model, answer.choices[0].text) == (model, wanted)
    chats = [
        server.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": TEXT}], max_tokens=8, temperature=0
        )
        for model in (MODEL, "red")
    ]
    assert [each.model for each in chats] == [MODEL, "red"]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="this server has: embedded, alias, red, blunt"):
        server.client.completions.create(model="blue", prompt=TEXT)


def test_an_adapter_with_a_template_of_its_own_is_talked_to_by_it(server: Server, spoken: NamedAdapter) -> None:
    conversation: Any = [{"role": "user", "content": TEXT}]
    chat = server.client.chat.completions.create(model="blunt", messages=conversation, max_tokens=8, temperature=0)
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "extra_body": {"add_special_tokens": False}}
    plain = server.client.completions.create(model="blunt", prompt=TEXT, **how)
    assert chat.usage is not None
    assert plain.usage is not None
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    assert chat.choices[0].message.content == plain.choices[0].text
    with LLM(device="cpu", dtype="float32", enable_lora=True) as llm:
        named = LoRARequest("blunt", 1, spoken.path)
        [output] = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=8), lora_request=named)
        assert output.outputs[0].text == chat.choices[0].message.content
        assert len(llm.chat_prompt(conversation)["prompt_token_ids"]) > chat.usage.prompt_tokens


def test_embeddings_are_those_of_the_adapter_that_they_name(start_server: StartServer, tmp_path: Path) -> None:
    folder = pooled_models.sentence_folder("bert", tmp_path / "embeds", "mean_tokens")
    PeftAdapter.of(pooled_models.build("bert"), tmp_path / "adapter", target_modules=["query", "output.dense"])
    named = NamedAdapter("red", str(tmp_path / "adapter"))
    options: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 8}
    with LLM(folder, device="cpu", dtype="float32", enable_lora=True) as llm:
        lora: list[LoRARequest | None] = [None, LoRARequest("red", 1, named.path)]
        wanted = [each.outputs.embedding for each in llm.embed(["the quick fox"] * 2, lora_request=lora)]
    with (
        engine_in_a_thread(tmp_path / "socket", model=str(folder), adapters=(named,), **options),
        start_server(folder, tmp_path / "socket", adapters=(named,)) as server,
    ):
        models = [each.id for each in server.client.models.list() if each.id != "red"]
        for model, vector in zip((models[0], "red"), wanted, strict=True):
            answer = server.client.embeddings.create(model=model, input="the quick fox", encoding_format="float")
            assert answer.model == model
            assert answer.data[0].embedding == pytest.approx(vector, abs=1e-5)
    assert wanted[0] != pytest.approx(wanted[1], abs=1e-3)


def test_names_obey_a_grammar_and_never_shadow_a_model(adapter: NamedAdapter) -> None:
    found = named_adapters(["a/b:1=/x=y", '{"name": "c", "path": "/z", "base_model_name": "m"}'], ["m"])
    assert found == (NamedAdapter("a/b:1", "/x=y"), NamedAdapter("c", "/z", "m"))
    for word, said in (
        ("m=/x", "taken"),
        ("a b=/x", "a name has up to 128"),
        ("=/x", "a name has up to 128"),
        ("a", "NAME=FOLDER"),
        ('{"name": "a"}', "needs name and path"),
        ('{"name": "a", "path": "/x", "base_model_name": "n"}', "no model here has"),
        ('{"name": "a", "path": "/x", "rank": 1}', "with 'rank'"),
        ("{", "is none"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            named_adapters([word], ["m"])
    with pytest.raises(InvalidConfig, match="taken"):
        named_adapters(["a=/x", "a=/y"], [])
