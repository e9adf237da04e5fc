"""What every HTTP request passes before a route: names, keys, limits, repetitions, the log. The app is real."""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from ridgeline.core.plan.embeds import Inserted, named_within
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving import owner
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.app import create_app
from ridgeline.serving.http import idempotency, middleware
from ridgeline.serving.http.middleware import HEALTH, ORDERS, with_keys, wrap
from ridgeline.serving.keys import allowed, tell_of_orders
from ridgeline.serving.processes.logs import JsonLines

FaceOf = Callable[..., AbstractAsyncContextManager[ApiServer]]
Test = Callable[[httpx.AsyncClient, ApiServer], Awaitable[None]]
ASKED = {"prompt": "def f(", "max_tokens": 8, "temperature": 1}


def run(api_server_of: FaceOf, test: Test, **settings: Any) -> None:
    """`test` with a client of a wrapped app under these settings of `ServeConfig`."""

    async def main() -> None:
        async with api_server_of(ServeConfig(**settings)) as api:
            app = wrap(create_app(api), api)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=api.config.root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                await test(client, api)

    asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_every_route_but_health_asks_for_a_key(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        document = create_app(api).openapi()["paths"]
        routes = [(path, method.upper()) for path, operations in document.items() for method in operations]
        assert len(routes) > 12
        others = (
            "/dashboard",
            "/dashboard/data",
            "/docs",
            "/openapi.json",
            "/nowhere",
            "/health/../metrics",
            "/healthy",
        )
        for path, method in [*routes, *((path, "GET") for path in others)]:
            await asyncio.sleep(0.01)  # this client is in the server's event loop, which must hear of its engine
            for headers in ({}, bearer("wrong"), {"Authorization": "key-1"}, {"X-API-Key": ""}):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == (200 if path in HEALTH else 401), (method, path, headers)
                if path not in HEALTH:
                    error = answer.json()["error"]
                    if path.startswith("/v1/messages"):
                        assert error["type"] == "authentication_error"
                    elif path.startswith(("/v2/models", "/api")):
                        assert "API key" in error
                    elif path != "/v2":
                        assert error["code"] == "invalid_api_key"
                    assert "www-authenticate" in answer.headers
            for headers in (bearer("key-1"), bearer("key-2"), {"X-API-Key": "key-2"}):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code != 401, (method, path, headers)

    run(api_server_of, test, api_key=("key-1", "key-2"))


def test_what_shows_other_clients_has_a_key_of_its_own(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        for path in ("/v1/requests", "/v1/requests/req-1", "/dashboard", "/dashboard/data", "/server_info"):
            assert (await client.get(path)).status_code == 401
            refused = await client.get(path, headers=bearer("client"))
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "admin_key_required"
            assert (await client.get(path, headers=bearer("admin"))).status_code in (200, 404)
            assert (await client.get(path, auth=("anyone", "admin"))).status_code in (200, 404)  # a browser's dialog
        assert (await client.get("/v1/models", headers=bearer("admin"))).status_code == 200
        for name in ("Origin", "Referer", "Sec-Fetch-Site"):  # a browser adds the password to what any page sends
            told = {name: "https://elsewhere.example"}
            asked = await client.post("/v1/completions", json=ASKED, auth=("anyone", "client"), headers=told)
            assert asked.status_code == 401
        assert (await client.post("/v1/completions", json=ASKED, auth=("anyone", "client"))).status_code == 200

    run(api_server_of, test, api_key=("client",), admin_key=("admin",))


def test_only_a_trusted_key_names_a_tenant_and_asks_for_any_priority(api_server_of: FaceOf) -> None:
    """The first 16 digits of its digest name every other key."""
    seen: list[str] = []

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        send = api.service.client.submit

        async def noted(*given: Any, **named: Any) -> Any:
            seen.append(owner.current())
            return await send(*given, **named)

        api.service.client.submit = noted  # type: ignore[method-assign]
        for key in ("plain", "trusted"):
            headers = {**bearer(key), "X-Ridgeline-Tenant": "acme"}
            urgent = {**ASKED, "priority": -1}
            assert (await client.post("/v1/completions", headers=headers, json=ASKED)).status_code == 200
            found = await client.post("/v1/completions", headers=headers, json=urgent)
            assert found.status_code == (200 if key == "trusted" else 400)
        wrong = {**bearer("trusted"), "X-Ridgeline-Tenant": "a/b"}
        assert (await client.post("/v1/completions", headers=wrong, json=ASKED)).status_code == 400

    run(api_server_of, test, api_key=("plain", "trusted"), trusted_key=("trusted",), priority_floor=0)
    assert seen == [sha256(b"plain").hexdigest()[:16], "acme", "acme"]


@pytest.mark.parametrize("sharing", ["all", "tenant"])
def test_prefixes_of_tenants_are_shared_as_the_operator_says(api_server_of: FaceOf, sharing: str) -> None:
    """A salt that looks like another tenant's changes nothing of that."""
    found: list[bool] = []
    begin = f"# prefixes of {sharing}\n" + "\n".join(f"value_{n} = {n * n}" for n in range(20))

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        async def cached(key: str, salt: str = "", **headers: str) -> None:
            body = {"prompt": begin, "max_tokens": 1, "cache_salt": salt or None}
            answer = await client.post("/v1/completions", headers={**bearer(key), **headers}, json=body)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 64)

        first, other = (sha256(key.encode()).hexdigest()[:16] for key in ("first", "other"))
        for key, salt in (("first", ""), ("first", ""), ("other", ""), ("other", ""), ("other", "own")):
            await cached(key, salt)
        for salt in (first, f"{first}\n", other, f"{other}\n"):
            await cached("other", salt)
        await cached("trusted", **{"X-Ridgeline-Tenant": first})
        await cached("trusted", **{"X-Ridgeline-Tenant": "acme"})

    keys = ("first", "other", "trusted")
    run(api_server_of, test, api_key=keys, trusted_key=("trusted",), prefix_sharing=sharing)
    apart = [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    together = [0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert found == (apart if sharing == "tenant" else together)


def test_vectors_of_tenants_have_names_apart_and_the_disk_counts_by_tenant() -> None:
    def apart(key: str, salt: str) -> Request:
        seen = named_within((Inserted(start=0, count=1, key=b"key", name="picture"),), salt)
        params = SamplingParams(max_tokens=1)
        asked = Request(
            id="x", prompt_token_ids=(1,), params=params, seed=0, max_total_tokens=2, cache_salt=salt, inserted=seen
        )
        owner.take(key, None)
        return owner.apart(asked)

    def ask() -> list[Request]:
        return [apart("one", ""), apart("one", "own"), apart("other", ""), apart("other", "own")]

    found = contextvars.copy_context().run(ask)
    assert len({each.inserted[0].name for each in found}) == len({each.cache_salt for each in found}) == 4
    mine, other = (sha256(key).hexdigest()[:16] for key in (b"one", b"other"))
    assert [each.salt_owner for each in found] == [mine, mine, other, other]


def test_an_admin_key_alone_leaves_the_rest_open(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/requests")).status_code == 401

    run(api_server_of, test, admin_key=("admin",))


@pytest.mark.parametrize("keys", [(), ("client",), ("client", "other")], ids=len)
def test_what_changes_what_others_get_is_closed_without_an_admin_key(
    api_server_of: FaceOf, keys: tuple[str, ...]
) -> None:
    document: dict[str, Any] = {}

    async def closed(client: httpx.AsyncClient, api: ApiServer) -> None:
        document.update(create_app(api).openapi()["paths"])
        for path in (*ORDERS, "/pause/", "/sleep/x"):
            for headers in ({}, bearer("wrong"), bearer("client")):
                answer = await client.post(path, headers=headers)
                assert answer.status_code == (403 if not keys or headers == bearer("client") else 401)
            assert answer.json()["error"]["code"] == "admin_key_required"
            assert "--admin-key" in answer.json()["error"]["message"]
        assert (await client.get("/is_paused", headers=bearer("client"))).json() == {"is_paused": False}

    async def opened(client: httpx.AsyncClient, api: ApiServer) -> None:
        assert (await client.post("/reset_prefix_cache", headers=bearer("client"))).status_code == 200
        assert (await client.post("/reset_prefix_cache")).status_code == (401 if keys else 200)

    run(api_server_of, closed, api_key=keys)
    run(api_server_of, opened, api_key=keys, open_admin_routes=True)
    posts = {
        path for path, methods in document.items() if "post" in methods and methods["post"]["tags"] == ["operator"]
    }
    assert posts == set(ORDERS), "an order that nobody has decided about"


@pytest.mark.parametrize(
    ("peer", "proxied", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("10.0.0.5", {}, 403),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.5"}, 403),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.5"}, 403),
    ],
)
def test_the_figures_of_the_cache_stay_on_this_machine_without_an_admin_key(
    peer: str, proxied: dict[str, str], status: int
) -> None:
    async def ask(**keys: Any) -> int:
        async def route(scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse("ok")(scope, receive, send)

        guarded = with_keys(route, (), keys.get("admin", ()), open_orders=keys.get("open", False))
        transport = httpx.ASGITransport(guarded, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/kv", headers=bearer("admin") | proxied)).status_code

    assert asyncio.run(ask()) == status
    assert asyncio.run(ask(admin=("admin",))) == 200
    assert asyncio.run(ask(admin=("other",))) == 401
    assert asyncio.run(ask(open=True)) == 200


@pytest.mark.parametrize(
    ("settings", "level"),
    [({}, "INFO"), ({"api_key": ("k",)}, "WARNING"), ({"open_admin_routes": True}, "WARNING")],
)
def test_the_log_says_who_may_give_orders(
    settings: dict[str, Any], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        tell_of_orders(ServeConfig(**settings))
        tell_of_orders(ServeConfig(**settings, admin_key=("a",)))
    assert [record.levelname for record in caplog.records] == [level]


def test_a_proxys_prefix_opens_nothing(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        assert (await client.get("/proxied/health")).status_code == 200
        assert (await client.get("/proxied/v1/requests")).status_code == 401
        for path in ("/proxied/v1/requests", "/proxied/proxied/v1/requests"):
            answer = await client.get(path, headers=bearer("admin"))
            assert answer.status_code == (200 if path.count("proxied") == 1 else 404)

    run(api_server_of, test, admin_key=("admin",), root_path="/proxied")


@pytest.mark.parametrize("given", ["first", "last", "none of them", ""])
def test_keys_are_compared_to_the_end_whatever_was_given(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert allowed(given, ["first", "a longer one", "last"]) is (given in ("first", "last"))
    assert compared == [(32, 32)] * 3


# ---- names and the log ----------------------------------------------------------------------------------------------


def test_requests_have_names_the_clients_own_if_they_are_harmless(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        for given in ("abc", "a.b:c-d_e", "x" * 128):
            answer = await client.get("/version", headers={"X-Request-Id": given})
            assert answer.headers["x-request-id"] == given
        for given in ("", "a b", "x" * 129, "a\tb", "<b>", "ä"):
            answer = await client.get("/nowhere", headers=[(b"x-request-id", given.encode("latin-1"))])
            assert answer.headers["x-request-id"].startswith("req-")
        names = {(await client.get("/version")).headers["x-request-id"] for _ in range(5)}
        assert len(names) == 5
        answer = await client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "mine"})
        assert answer.json()["id"] == "cmpl-mine"

    run(api_server_of, test)


def test_the_access_log_is_json_without_secrets(api_server_of: FaceOf, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        headers = bearer("secret-key") | {"X-Request-Id": "named"}
        await client.get("/v1/models/no%0Asuch?token=secret-query", headers=headers)
        await client.get("/health")

    with caplog.at_level(logging.INFO, "ridgeline.access"):
        run(api_server_of, test, api_key=("secret-key",))
    records = [record for record in caplog.records if record.name == "ridgeline.access"]
    assert len(records) == 1  # probes are no news
    text = JsonLines().format(records[0])
    line = json.loads(text)
    assert (line["request_id"], line["method"], line["status"]) == ("named", "GET", 404)
    assert line["path"].startswith("/v1/models/no%0Asuch")
    assert 0 <= line["seconds"] < 5
    assert "secret" not in text
    assert "\n" not in text


def test_no_access_log_where_none_is_wanted(api_server_of: FaceOf, caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        await client.get("/version")

    with caplog.at_level(logging.INFO, "ridgeline.access"):
        run(api_server_of, test, access_log=False)
    assert not [record for record in caplog.records if record.name == "ridgeline.access"]


# ---- limits, other origins, the end ---------------------------------------------------------------------------------


def test_a_body_that_is_too_long_is_not_read(api_server_of: FaceOf) -> None:
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 100
            yield b"x" * 100

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        told = await client.post("/v1/completions", content=b"x" * 1001)
        untold = await client.post("/v1/completions", content=pieces())
        for answer in (told, untold):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert "1000" in answer.json()["error"]["message"]
        assert read < 2000
        fits = await client.post("/v1/completions", content=json.dumps(ASKED).encode().ljust(1000))
        assert fits.status_code == 200

    run(api_server_of, test, max_body_bytes=1000)


def test_a_body_that_does_not_come_is_not_waited_for(api_server_of: FaceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT", 0.05)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        answer = await client.post("/v1/completions", content=pieces())
        assert answer.status_code == 504

    run(api_server_of, test)


def test_browsers_of_allowed_origins_may_ask(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        ours = await client.options("/v1/completions", headers={"Origin": "https://ours", **asked})
        assert ours.status_code == 200  # browsers send no key with this one
        assert ours.headers["access-control-allow-origin"] == "https://ours"
        others = await client.options("/v1/completions", headers={"Origin": "https://others", **asked})
        assert "access-control-allow-origin" not in others.headers
        refused = await client.get("/v1/models", headers={"Origin": "https://ours"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://ours"  # so that the page can read why

    run(api_server_of, test, allowed_origins=("https://ours",), api_key=("key",))


def test_while_the_server_ends_new_work_goes_elsewhere(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        api.service.admission.draining = True
        answer = await client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["connection"] == "close"
        assert answer.json()["error"]["type"] == "service_unavailable"
        states = [(await client.get(path)).status_code for path in (*HEALTH, "/metrics")]
        assert dict(zip((*HEALTH, "/metrics"), states, strict=True)) == {
            "/health": 200, "/health/live": 200, "/health/ready": 503, "/ping": 200, "/metrics": 200,
            "/v2/health/live": 200, "/v2/health/ready": 503,
        }  # fmt: skip

    run(api_server_of, test)


def test_the_load_is_the_number_of_open_requests(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        async def load() -> int:
            return (await client.get("/load")).json()["server_load"]

        assert await load() == 0
        running = asyncio.ensure_future(client.post("/v1/completions", json={**ASKED, "max_tokens": 64, "n": 3}))
        while (now := await load()) == 0:
            await asyncio.sleep(0.001)
        assert now == 3
        assert (await running).status_code == 200
        assert await load() == 0

    run(api_server_of, test)


# ---- requests that come twice ---------------------------------------------------------------------------------------


def test_a_repetition_gets_the_first_answer(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        for asked in (ASKED, {**ASKED, "stream": True}):
            headers = {"Idempotency-Key": f"key-{asked.get('stream')}"}
            first = await client.post("/v1/completions", json=asked, headers=headers)
            again = await client.post("/v1/completions", json=asked, headers=headers)
            other = await client.post("/v1/completions", json=asked, headers={"Idempotency-Key": "another"})
            assert first.status_code == 200
            assert again.content == first.content
            assert again.headers["idempotent-replayed"] == "true"
            assert "idempotent-replayed" not in first.headers
            assert again.headers["x-request-id"] != first.headers["x-request-id"]
            assert other.content != first.content

    run(api_server_of, test)


def test_a_repetition_waits_for_what_still_runs(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        headers = {"Idempotency-Key": "k"}
        asked = {**ASKED, "max_tokens": 64, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=asked, headers=headers) for _ in range(4)))
        assert len({answer.content for answer in answers}) == 1
        assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False, True, True, True]

    run(api_server_of, test)


def test_a_key_belongs_to_a_body_a_client_and_a_path(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        async def post(key: str = "one", **others: Any) -> httpx.Response:
            headers = {"Idempotency-Key": "k", **bearer(key)}
            return await client.post("/v1/completions", json={**ASKED, **others}, headers=headers)

        first = await post()
        changed = await post(max_tokens=9)
        assert changed.status_code == 422
        assert changed.json()["error"]["code"] == "idempotency_key_reused"
        theirs = await post(key="two")
        assert theirs.content != first.content
        elsewhere = await client.post(
            "/tokenize", json={"prompt": "def f("}, headers={"Idempotency-Key": "k", **bearer("one")}
        )
        assert elsewhere.json()["count"] > 0
        bad = await client.post("/v1/completions", json=ASKED, headers={"Idempotency-Key": "k" * 256, **bearer("one")})
        assert bad.status_code == 400

    run(api_server_of, test, api_key=("one", "two"))


def test_failures_of_the_server_are_tried_again_mistakes_are_not(api_server_of: FaceOf) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        async def post(key: str, **others: Any) -> httpx.Response:
            return await client.post("/v1/completions", json={**ASKED, **others}, headers={"Idempotency-Key": key})

        admission = api.service.admission
        admission.max_requests = admission.open_requests = 1  # another request's
        assert (await post("full")).status_code == 429
        admission.open_requests = 0
        assert (await post("full")).status_code == 200
        assert (await post("wrong", n=-1)).status_code == 400
        assert (await post("wrong", n=-1)).headers["idempotent-replayed"] == "true"

    run(api_server_of, test)


def test_answers_are_kept_for_a_time_and_within_bounds(api_server_of: FaceOf, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, api: ApiServer) -> None:
        async def post(key: str) -> httpx.Response:
            return await client.post("/v1/completions", json=ASKED, headers={"Idempotency-Key": key})

        monkeypatch.setattr(idempotency, "LIFETIME", 0.05)
        first = await post("old")
        await asyncio.sleep(0.1)
        assert (await post("old")).content != first.content
        monkeypatch.setattr(idempotency, "LIFETIME", 60.0)
        monkeypatch.setattr(idempotency, "MOST_BYTES_EACH", 10)
        assert (await post("long")).status_code == 200
        unkept = await post("long")
        assert unkept.status_code == 409
        assert unkept.json()["error"]["code"] == "idempotent_answer_not_kept"

    run(api_server_of, test)


def test_websockets_are_not_let_in(api_server_of: FaceOf) -> None:
    async def main() -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async with api_server_of() as api:
            await wrap(create_app(api), api)({"type": "websocket", "path": "/v1/models"}, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(main())
