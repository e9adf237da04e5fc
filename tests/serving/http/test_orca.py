"""The load of the engines in the header of answers, for load balancers."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from ridgeline.serving.http.orca import load_of, written
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer

ASKED: Any = {"model": MODEL, "prompt": "x =", "max_tokens": 2}
NAMES = {"kv_cache_usage_perc", "num_requests_waiting"}


@pytest.fixture(scope="module")
def told(server: Server) -> Server:
    """A server whose engine has told of itself once."""
    ends = time.monotonic() + PATIENCE
    while not load_of(server.api) and time.monotonic() < ends:
        time.sleep(0.02)
    return server


def post(server: Server, form: str, **more: Any) -> httpx.Response:
    headers = {"endpoint-load-metrics-format": form}
    return httpx.post(f"{server.url}/v1/completions", json=ASKED | more, headers=headers, timeout=PATIENCE)


def test_an_answer_has_the_load_in_the_form_that_was_asked_for(told: Server) -> None:
    for more in ({}, {"stream": True}):
        form, _, rest = post(told, "JSON", **more).headers["endpoint-load-metrics"].partition(" ")
        assert form == "JSON"
        load = json.loads(rest)["named_metrics"]
        assert load.keys() == NAMES
        assert 0 <= load["kv_cache_usage_perc"] <= 1
        form, _, rest = post(told, "text", **more).headers["endpoint-load-metrics"].partition(" ")
        assert form == "TEXT"
        pairs = dict(each.removeprefix("named_metrics.").split("=") for each in rest.split(", "))
        assert pairs.keys() == NAMES
        assert float(pairs["num_requests_waiting"]) >= 0


def test_nothing_is_told_that_was_not_asked_for(told: Server) -> None:
    plain = httpx.post(f"{told.url}/v1/completions", json=ASKED, timeout=PATIENCE)
    assert "endpoint-load-metrics" not in plain.headers
    other = post(told, "PROTOBUF")
    assert (other.status_code, "endpoint-load-metrics" in other.headers) == (200, False)
    assert other.headers["ridgeline-ignored"] == "endpoint-load-metrics-format"
    assert written("TEXT", {}) is None


def test_the_load_is_for_clients_with_a_key(start_server: StartServer) -> None:
    with start_server(api_key=["secret"]) as server:
        refused = post(server, "TEXT")
        assert (refused.status_code, "endpoint-load-metrics" in refused.headers) == (401, False)
        ends, known = time.monotonic() + PATIENCE, {"Authorization": "Bearer secret"}
        while not load_of(server.api) and time.monotonic() < ends:
            time.sleep(0.02)
        for more, told in ((known, True), ({}, False), ({"Authorization": "Bearer other"}, False)):
            headers = {"endpoint-load-metrics-format": "JSON", **more}
            health = httpx.get(f"{server.url}/health", headers=headers, timeout=PATIENCE)
            assert (health.status_code, "endpoint-load-metrics" in health.headers) == (200, told)


def test_the_figures_are_those_of_the_metrics() -> None:
    load = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}
    assert (
        written("TEXT", load) == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )
    assert json.loads(str(written("JSON", load)).removeprefix("JSON ")) == {"named_metrics": load}
