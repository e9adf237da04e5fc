"""What programs that act for a user sent, sent again: each request is answered as it was, and says by the same names
what is left out. The bodies are those that test_agents.py stored, with their prose shortened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import scripted_model
from tests.serving.clients.agents import AGENTS, NOTES
from tests.serving.clients.bodies import BODIES, ignored, told
from tests.serving.conftest import PATIENCE, Server, StartServer, engine_in_a_thread

FILE = f"/home/user/work/{NOTES}"


@pytest.fixture(scope="module", params=sorted(AGENTS))
def replayed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_server: StartServer
) -> Iterator[tuple[str, Server]]:
    """A program, and a server whose model follows its script."""
    folder, script = tmp_path_factory.mktemp("a"), AGENTS[request.param].script
    model = scripted_model.save(folder / "model", script.turns(FILE), script.plain(FILE))
    with engine_in_a_thread(folder / "s", model=str(model)), start_server(model, folder / "s") as server:
        yield request.param, server


@pytest.mark.few(6)
def test_a_programs_requests_are_answered_as_they_were(replayed: tuple[str, Server]) -> None:
    name, server = replayed
    requests = json.loads((BODIES / f"{name}.json").read_text())
    assert requests
    for kept in requests:
        body = kept["body"] | {"model": server.api.names[0]}
        answer = httpx.post(f"{server.url}{kept['path']}", json=body, headers=kept["headers"], timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        assert sorted(ignored(answer.headers)) == kept["ignored"]
        assert told(kept["path"], answer.text) == kept["told"]


def test_bodies_hold_nothing_private() -> None:
    for file in BODIES.glob("*.json"):
        text = file.read_text()
        assert str(Path.home()) + "/" not in text.replace("/home/user", "")
        assert "/tmp/" not in text
        assert "Bearer" not in text
