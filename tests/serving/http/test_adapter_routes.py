"""Adapters that are loaded and unloaded over HTTP: by the admin key, below one folder, while other requests run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import PATIENCE, Server, StartServer, engine_in_a_thread

pytest.importorskip("peft")

from tests.peft_adapters import save_random

TEXT = "def add(a, b):"
KEY = {"Authorization": "Bearer admin"}
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters, and folders that are none, below the folder that the server reads."""
    root = tmp_path_factory.mktemp("adapters")
    outside = tmp_path_factory.mktemp("outside")
    for number, name in enumerate(("red", "blue", "green")):
        save_random(EMBEDDED_MODEL, root / name, seed=number)
    shutil.copytree(root / "red", outside / "red")
    (root / "link").symlink_to(outside / "red")
    (root / "near").symlink_to(root / "red")
    (root / "files").mkdir()
    for name in FILES:
        (root / "files" / name).symlink_to(outside / "red" / name)
    for name in ("broken", "foreign", "high"):
        shutil.copytree(root / "red", root / name)
    (root / "broken" / FILES[1]).write_bytes((root / "red" / FILES[1]).read_bytes()[:-100])
    config = json.loads((root / "red" / FILES[0]).read_text())
    (root / "foreign" / FILES[0]).write_text(json.dumps(config | {"r": 3}))
    (root / "high" / FILES[0]).write_text(json.dumps(config | {"r": 256}))
    return root


@pytest.fixture(scope="module")
def servers(
    root: Path, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two API servers of one engine, which may have two adapters."""
    socket = tmp_path_factory.mktemp("engine") / "socket"
    settings: dict[str, Any] = {
        "engine": socket,
        "lora_dir": str(root),
        "engine_options": {"enable_lora": True},
        "admin_key": ("admin",),
    }
    options: dict[str, Any] = {"enable_lora": True, "most_adapters": 2}
    with (
        engine_in_a_thread(socket, **options),
        start_server(**settings) as one,
        start_server(**settings) as two,
    ):
        yield one, two


def post(server: Server, what: str, key: dict[str, str] = KEY, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body, headers=key, timeout=PATIENCE)


def load(server: Server, name: str, path: str, **more: Any) -> httpx.Response:
    return post(server, "load", lora_name=name, lora_path=path, **more)


def unload(server: Server, name: str) -> httpx.Response:
    return post(server, "unload", lora_name=name)


def names(server: Server) -> set[str]:
    return {each.id for each in server.client.models.list() if each.parent is not None}  # type: ignore[attr-defined]


def text(server: Server, model: str) -> str:
    answer = server.client.completions.create(model=model, prompt=TEXT, max_tokens=8, temperature=0)
    return answer.choices[0].text


def until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_adapters_come_and_go_at_every_api_server(servers: tuple[Server, Server], root: Path) -> None:
    one, two = servers
    plain = text(one, "embedded")
    answer = load(one, "red", "red")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert names(one) == {"red"}
    until(lambda: names(two) == {"red"})
    red = text(two, "red")
    assert red != plain
    assert load(two, "near", str(root / "near")).status_code == 200  # the same files, by an absolute path and a link
    assert text(two, "near") == red
    again = load(two, "red", "blue")
    assert (again.status_code, "load_inplace" in again.json()["error"]["message"]) == (400, True)
    full = load(two, "green", "green")
    assert (full.status_code, "max_served_loras" in full.json()["error"]["message"]) == (400, True)
    assert unload(two, "near").status_code == 200
    assert load(one, "red", "blue", load_inplace=True).status_code == 200
    until(lambda: text(two, "red") not in (red, plain))
    assert unload(one, "red").text == "Success: LoRA adapter 'red' removed successfully."
    assert unload(one, "red").status_code == 404
    until(lambda: not names(two))
    with pytest.raises(Exception, match="does not exist"):
        text(one, "red")
    assert text(one, "embedded") == plain


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("embedded", "red", "a model's name"),
        ("alias", "red", "a model's name"),
        ("a b", "red", "a name has up to 128"),
        ("x", "/etc", "below the server's --lora-dir"),
        ("x", "../outside", "below the server's --lora-dir"),
        ("x", "link", "below the server's --lora-dir"),
        ("x", "files", "below the server's --lora-dir"),
        ("x", "\0", "below the server's --lora-dir"),
        ("x", "none", "no such folder"),
        ("x", "broken", "damaged"),
        ("x", "foreign", "of shape"),
        ("x", "high", "max_lora_rank"),
    ],
)
def test_what_cannot_be_loaded_gets_a_sentence(name: str, path: str, said: str, servers: tuple[Server, Server]) -> None:
    answer = load(servers[0], name, path)
    assert answer.status_code == (404 if path == "none" else 400)
    assert said in answer.json()["error"]["message"]
    assert not names(servers[0])


def test_only_the_admin_key_and_the_option_open_the_routes(
    servers: tuple[Server, Server], start_server: StartServer
) -> None:
    for key in ({}, {"Authorization": "Bearer client"}):
        assert post(servers[0], "load", key, lora_name="x", lora_path="red").status_code in (401, 403)
        assert post(servers[0], "unload", key, lora_name="x").status_code in (401, 403)
    with start_server(admin_key=("admin",)) as server:
        for answer in (load(server, "x", "red"), unload(server, "x")):
            assert answer.status_code == 404
            assert "--lora-dir" in answer.json()["error"]["message"]


@pytest.mark.dealt
def test_requests_end_with_the_adapter_that_was_unloaded_meanwhile(servers: tuple[Server, Server]) -> None:
    one, two = servers
    assert load(one, "red", "red").status_code == 200
    whole = one.client.completions.create(
        model="red", prompt=TEXT, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    stream = one.client.completions.create(
        model="red", prompt=TEXT, max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [next(stream).choices[0].text]
    assert unload(two, "red").status_code == 200
    assert load(two, "red", "blue").status_code == 200  # the name stands for another by now
    pieces += [each.choices[0].text for each in stream]
    assert "".join(pieces) == whole.choices[0].text
    assert text(two, "red") != whole.choices[0].text[:20]
    assert unload(two, "red").status_code == 200


def test_metrics_count_requests_by_adapter(servers: tuple[Server, Server]) -> None:
    one, _ = servers
    assert load(one, "green", "green").status_code == 200
    text(one, "green")
    page = httpx.get(f"{one.url}/metrics", headers=KEY).text
    assert 'ridgeline:lora_requests_total{engine="0",lora_name="green",model_name="embedded"} 1.0' in page
    assert 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}' in page
    assert unload(one, "green").status_code == 200
