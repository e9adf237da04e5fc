"""What /render shows is what the engine gets."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from ridgeline.serving.http import answers
from ridgeline.serving.http.absent import absence
from tests.serving.conftest import MODEL, PATIENCE, Server

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 4}


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=PATIENCE)


def test_a_chat_is_shown_as_its_prompt_and_runs_alike(server: Server) -> None:
    asked = CHAT | {"temperature": 0, "seed": 3, "cache_salt": "x", "stream": True, "priority": 2}
    shown = post(server, "chat/completions/render", **asked)
    told = msgspec.json.decode(shown.content, type=answers.Rendered)
    assert (told.model, told.stream, told.cache_salt, told.priority) == (MODEL, True, "x", 2)
    assert {"max_tokens": 4, "temperature": 0.0, "seed": 3}.items() <= told.sampling_params.items()
    ran = post(server, "chat/completions", **CHAT, temperature=0, return_token_ids=True, return_prompt_text=True)
    assert ran.json()["prompt_token_ids"] == told.token_ids
    assert ran.json()["prompt_text"] == told.prompt
    text = post(server, "completions", model=MODEL, prompt=told.token_ids, max_tokens=4, temperature=0)
    assert text.json()["choices"][0]["text"] == ran.json()["choices"][0]["message"]["content"]


def test_prompts_are_shown_one_by_one(server: Server) -> None:
    shown = post(server, "completions/render", prompt=["a", "b c"], max_tokens=4).json()
    ids = [server.api.tokenizer.encode(text) for text in ("a", "b c")]
    assert [msgspec.convert(each, type=answers.Rendered).token_ids for each in shown] == ids


def test_mistakes_are_those_of_the_route_that_runs(server: Server) -> None:
    for path, wrong in (("chat/completions", CHAT | {"top_p": 7}), ("completions", {"prompt": "a", "logprobs": -2})):
        shown, ran = post(server, f"{path}/render", **wrong), post(server, path, **wrong)
        assert (shown.status_code, shown.json()) == (ran.status_code, ran.json())
        assert shown.status_code == 400


def test_a_response_and_a_message_are_shown_as_the_chat_that_they_become(server: Server) -> None:
    chat = post(server, "chat/completions/render", **CHAT).json()
    said = {name: value for name, value in CHAT.items() if name != "messages"}
    response = {"model": MODEL, "max_output_tokens": 4, "input": CHAT["messages"], "stream": True}
    for path, body in (("messages", CHAT | {"stream": True}), ("responses", response)):
        told = msgspec.json.decode(post(server, f"{path}/render", **body).content, type=answers.Rendered)
        assert (told.prompt, told.token_ids, told.stream) == (chat["prompt"], chat["token_ids"], True)
        assert told.sampling_params["max_tokens"] == 4
    error = post(server, "messages/render", **said).json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def test_a_route_of_another_server_says_what_to_use(server: Server) -> None:
    for path in ("audio/speech", "chat/completions/batch", "decisions"):
        error = post(server, path).json()["error"]
        assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
        assert error["message"].startswith("/v1/")
        assert error["message"].endswith(".")
        assert "is not here: " in error["message"]
    here = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert not [path for path in here if absence(path)]
    assert post(server, "audios").json()["error"]["message"] == "Not Found."
