"""Requests that schemathesis derives from the OpenAPI document, right and wrong ones: no answer is a failure of the
server, each is one that the document knows, and the engine still works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, start_engine, stop_engine

SCHEMATHESIS = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def small(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its context is short: requests that name no length fill it."""
    socket = tmp_path_factory.mktemp("engine") / "socket"
    process = start_engine(socket, max_model_len=64)
    try:
        with start_server(engine=socket, open_admin_routes=True) as server:
            yield server
    finally:
        stop_engine(process)


ORDERS = "^/(pause|resume|sleep|wake_up|reload_weights)$"  # after which others may wait


def test_nothing_that_is_sent_breaks_the_server(small: Server, tmp_path: Path) -> None:
    before = answer(small)
    ask(small, tmp_path, 10, "--exclude-path-regex", ORDERS)
    assert small.wait_idle()
    assert answer(small) == before


@pytest.mark.dealt
def test_no_order_breaks_the_server(small: Server, tmp_path: Path) -> None:
    before = answer(small)
    ask(small, tmp_path, 4, "--include-path-regex", ORDERS)
    for order in ("wake_up", "resume"):
        # 409: awake already
        assert httpx.post(f"{small.url}/{order}", timeout=PATIENCE).status_code in (200, 409)
    assert small.wait_idle()
    assert answer(small) == before


def test_an_order_that_is_refused_is_in_the_document(small: Server) -> None:
    """In whichever order the test before asks."""
    document = httpx.get(f"{small.url}/openapi.json", timeout=PATIENCE).json()
    httpx.post(f"{small.url}/sleep", timeout=PATIENCE).raise_for_status()
    refused = httpx.post(f"{small.url}/resume", timeout=PATIENCE)
    httpx.post(f"{small.url}/wake_up", timeout=PATIENCE).raise_for_status()
    assert refused.status_code == 409
    for path in ("pause", "resume", "sleep", "wake_up", "reload_weights"):
        assert {"400", "409"} <= document["paths"][f"/{path}"]["post"]["responses"].keys()


def answer(server: Server) -> str:
    return server.client.completions.create(model=MODEL, prompt="x =", max_tokens=8, temperature=0).choices[0].text


def ask(server: Server, folder: Path, seconds: int, *paths: str) -> None:
    """Let schemathesis ask for so long. No check of its own may fail."""
    command = [*SCHEMATHESIS, "--no-color", "run", f"{server.url}/openapi.json", "--checks", CHECKS, *paths]
    command += ["--max-time", str(seconds), "--phases", "coverage,fuzzing", "--seed", "1", "--no-shrink"]
    command += ["--generation-database", "none", "--request-timeout", "120", "--warnings", "off"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " generated, " in done.stdout, "it asked nothing"
