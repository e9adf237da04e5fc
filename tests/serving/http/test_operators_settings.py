"""Settings that change what HTTP shows: prefixes, CORS, middleware, templates' arguments, bounds on logprobs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.http.middleware import wrap
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.validation import render

FaceOf = Callable[..., AbstractAsyncContextManager[ApiServer]]
ASKED = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
MIDDLEWARE = """
from starlette.responses import PlainTextResponse

class Mark:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-mark", scope["state"]["request_id"].encode())]
            await send(message)

        await self.app(scope, receive, marked)

async def guard(request, call_next):
    if request.headers.get("x-forbidden"):
        return PlainTextResponse("no", 418)
    return await call_next(request)

def plain(request):
    return None
"""


def run(
    api_server_of: FaceOf, test: Callable[[httpx.AsyncClient, ApiServer], Awaitable[None]], **settings: Any
) -> None:
    async def main() -> None:
        async with api_server_of(ServeConfig(**settings)) as api:
            transport = httpx.ASGITransport(wrap(create_app(api), api), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                await test(client, api)

    asyncio.run(main())


def test_a_proxys_prefix_may_be_removed_or_not(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/llm"):
            assert (await client.get(f"{prefix}/health")).status_code == 200
            assert (await client.get(f"{prefix}/v1/models")).status_code == 401
            assert (await client.get(f"{prefix}/v1/requests", headers=key)).status_code == 403
            answer = await client.post(f"{prefix}/v1/completions", json=ASKED, headers=key)
            assert answer.json()["usage"]["completion_tokens"] == 4
        assert (await client.get("/llmv1/models", headers=key)).status_code == 404
        assert (await client.get("/llm/llm/v1/models", headers=key)).status_code == 404

    run(api_server_of, test, root_path="/llm", api_key=("k",), admin_key=("a",))


def test_answers_and_streams_tell_times_and_usage_without_being_asked(api_server_of: FaceOf) -> None:
    chat = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    names = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "tokens_per_second", "mean_itl_ms"}

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        for path, asked in (("/v1/completions", ASKED | {"ignore_eos": True}), ("/v1/chat/completions", chat)):
            begun = time.monotonic()
            whole = (await client.post(path, json=asked | {"include_breakdown": True})).json()
            took = 1000 * (time.monotonic() - begun)
            metrics, [part] = whole["metrics"], whole["ridgeline"]["completions"]
            assert metrics.keys() == names
            assert 0 <= metrics["queue_time_ms"] == 1000 * part["queue"]
            assert metrics["time_to_first_token_ms"] + metrics["generation_time_ms"] < took
            assert metrics["mean_itl_ms"] * 3 == pytest.approx(metrics["generation_time_ms"])
            assert metrics["tokens_per_second"] == pytest.approx(4 / (part["prefill"] + part["decode"]))
            one = (await client.post(path, json=asked | {"max_tokens": 1})).json()
            assert one["metrics"].keys() == names - {"mean_itl_ms"}
            assert "metrics" not in (await client.post(path, json=asked | {"n": 2})).json()
            stream = await client.post(path, json=asked | {"stream": True})
            *chunks, last = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
            counts = [chunk["usage"]["completion_tokens"] for chunk in [*chunks, last]]
            assert counts == [*([0] if "chat" in path else []), 1, 2, 3, 4, 4]
            assert (last["choices"], last["metrics"].keys()) == ([], names)
            assert not any("metrics" in chunk for chunk in chunks)

    run(api_server_of, test, enable_force_include_usage=True, enable_per_request_metrics=True)


def test_tokens_of_logprobs_have_the_names_that_the_operator_chose(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        for asked, by_id in ((None, True), (False, False)):
            body = ASKED | {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": asked}
            [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
            names = [f"token_id:{token}" for token in choice["token_ids"]]
            assert (choice["logprobs"]["tokens"] == names) is by_id

    run(api_server_of, test, return_tokens_as_token_ids=True)


def test_origins_methods_headers_and_credentials(api_server_of: FaceOf) -> None:
    asked = {
        "Origin": "http://page", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-mine"
    }  # fmt: skip

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        allowed = await client.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "http://page"
        assert allowed.headers["access-control-allow-credentials"] == "true"
        assert (await client.options("/v1/completions", headers=asked | {"Origin": "http://other"})).status_code == 400
        other = {"Access-Control-Request-Headers": "x-other"}
        assert (await client.options("/v1/completions", headers=asked | other)).status_code == 400
        assert [(await client.get(path)).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3

    settings = {"allowed_methods": ("POST",), "allowed_headers": ("x-mine",), "allow_credentials": True}
    run(api_server_of, test, allowed_origins=("http://page",), disable_fastapi_docs=True, **settings)


def test_middleware_of_the_operators_own(
    api_server_of: FaceOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "our_layers.py").write_text(MIDDLEWARE)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        key = {"Authorization": "Bearer k"}
        answer = await client.post("/v1/completions", json=ASKED, headers=key)
        assert answer.headers["x-mark"] == answer.headers["x-request-id"]
        assert answer.json()["usage"]["completion_tokens"] == 4
        streamed = await client.post("/v1/completions", json=ASKED | {"stream": True}, headers=key)
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = await client.post("/v1/completions", json=ASKED, headers=key | {"x-forbidden": "1"})
        assert (refused.status_code, refused.headers["x-mark"] != "") == (418, True)
        unknown = await client.post("/v1/completions", json=ASKED)
        assert (unknown.status_code, "x-mark" in unknown.headers) == (401, False), "keys come first"

    run(api_server_of, test, api_key=("k",), middleware=("our_layers.Mark", "our_layers.guard"))
    sys.modules.pop("our_layers")


@pytest.mark.parametrize("path", ["no_such_module.Thing", "asyncio.NoSuchThing", "justaname", "os.path.join", ""])
def test_middleware_that_cannot_be_had_is_one_sentence(path: str, api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        pass

    with pytest.raises(InvalidConfig, match="middleware"):
        run(api_server_of, test, middleware=(path,))


def test_the_templates_arguments_have_defaults(api_server_of: FaceOf, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}")

    async def main(given: str) -> list[str]:
        defaults = {"enable_thinking": False, "reasoning_effort": "low"}
        config = ServeConfig(chat_template=given, default_chat_template_kwargs=defaults)
        async with api_server_of(config) as api:
            bodies: list[dict[str, Any]] = [
                {},
                {"reasoning_effort": "high"},
                {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "x", "enable_thinking": 1}},
            ]
            asked = [ChatBody(messages=[{"role": "user", "content": "hi"}], **body) for body in bodies]
            return [await render(api, body) for body in asked]

    for given in (str(template), template.read_text()):  # a file, or the text itself
        assert asyncio.run(main(given)) == ["False low hi", "False high hi", "1 x hi"]
    with pytest.raises(InvalidConfig, match=r"nowhere.jinja' cannot be used"):
        asyncio.run(main("nowhere.jinja"))
    with pytest.raises(InvalidConfig, match="tools"):
        ServeConfig(default_chat_template_kwargs={"tools": []})


def test_sampling_defaults_of_the_operators_own(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 5, "max_new_tokens": 9}')
    own = {"temperature": 0.1, "max_new_tokens": 7}
    found = GenerationDefaults.of("auto", tmp_path, own)
    assert (found.sampling, found.max_tokens) == ({"temperature": 0.1, "top_k": 5}, 7)
    none = GenerationDefaults.of("none", tmp_path, own)
    assert (none.sampling, none.max_tokens) == ({"temperature": 0.1}, 7)
    assert GenerationDefaults.of("auto", tmp_path).max_tokens == 9


@pytest.mark.parametrize("path", ["llm", "/llm/", "/v1"])
def test_a_prefix_that_could_not_be_told_from_a_route_is_refused(path: str) -> None:
    with pytest.raises(InvalidConfig, match="root_path"):
        ServeConfig(root_path=path)
