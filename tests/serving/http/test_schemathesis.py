"""Requests that schemathesis derives from the OpenAPI document, right and wrong ones: no answer is a failure of the
server, each is one that the document knows, and the engine still works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.conftest import MODEL, Server, StartServer, start_engine, stop_engine

SCHEMATHESIS = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def small(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its context is short: requests that name no length fill it."""
    socket = tmp_path_factory.mktemp("engine") / "socket"
    process = start_engine(socket, max_model_len=64)
    try:
        with start_server(engine=socket) as server:
            yield server
    finally:
        stop_engine(process)


def test_nothing_that_is_sent_breaks_the_server(small: Server, tmp_path: Path) -> None:
    before = small.client.completions.create(model=MODEL, prompt="x =", max_tokens=8, temperature=0).choices[0].text
    command = [*SCHEMATHESIS, "--no-color", "run", f"{small.url}/openapi.json", "--checks", CHECKS]
    command += ["--max-time", "10", "--phases", "coverage,fuzzing", "--seed", "1"]
    command += [
        "--generation-database",
        "none",
        "--no-shrink",
        "--request-timeout",
        "120",
        "--warnings",
        "off",
        "--suppress-health-check",
        "all",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " generated, " in done.stdout, "it asked nothing"
    assert small.wait_idle()
    after = small.client.completions.create(model=MODEL, prompt="x =", max_tokens=8, temperature=0).choices[0].text
    assert after == before
