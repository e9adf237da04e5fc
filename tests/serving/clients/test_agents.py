"""Programs that act for a user, as they are in the registries, against `ridgeline serve` with a model that follows a
script: each changes a file by a tool call and reads it back.

A program has an empty home and, where the kernel lets a user have one, a network of its own in which it reaches the
server and nothing else (apart.py). With RIDGELINE_RECORD=1 what it sent is stored for test_replays.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import scripted_model
from tests.serving.clients.agents import AFTER, AGENTS, BEFORE, LAST, NOTES, Program
from tests.serving.clients.bodies import BODIES, ignored, stored, told
from tests.serving.conftest import PATIENCE

ROOT = Path(os.environ.get("RIDGELINE_AGENTS", os.devnull)).resolve()  # `make clients` says where they are installed
PROJECT = Path(__file__).parents[3]
SECONDS = 120  # for a whole run
HOME = "/home/user"
pytestmark = pytest.mark.clients


def _alone() -> list[str]:
    """Return the command that gives a program a network of its own; [] where the kernel refuses it."""
    command = ["unshare", "--map-current-user", "--net", "--keep-caps"]
    with suppress(FileNotFoundError):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


@contextmanager
def serving(model: Path, socket: Path, names: list[str]) -> Iterator[None]:
    """`ridgeline serve` on a Unix socket."""
    log = socket.with_suffix(".log")
    command = [sys.executable, "-m", "ridgeline", "serve", str(model), "--uds", str(socket), "--served-model-name"]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *names], stdout=file, stderr=subprocess.STDOUT, cwd=PROJECT)
    try:
        end = time.monotonic() + PATIENCE
        while "Ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, since that of a Unix socket has at most 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="agent-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _run(name: str, program: Program, folder: Path, file: Path) -> subprocess.CompletedProcess[str]:
    home, alone = folder / "home", _alone()
    port = "8000" if alone else str(_free_port())
    places = {
        "{home}": home,
        "{work}": file.parent,
        "{bin}": program.commands(ROOT),
        "{url}": f"http://127.0.0.1:{port}",
    }

    def filled(text: str) -> str:
        for mark, value in places.items():
            text = text.replace(mark, str(value))
        return text

    for path, content in program.files.items():
        Path(filled(path)).parent.mkdir(parents=True, exist_ok=True)
        Path(filled(path)).write_text(filled(content))
    env = {
        "HOME": str(home),
        "PATH": f"{program.commands(ROOT)}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    if not alone:  # the best that is left: no program that keeps to its proxy gets out
        refused = "http://127.0.0.1:9"
        env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), refused) | {"NO_PROXY": "127.0.0.1,localhost"}
    env |= {key: filled(value) for key, value in program.env.items()}
    proxy = [
        sys.executable,
        str(Path(__file__).parent / "apart.py"),
        str(folder / "socket"),
        str(folder / "record"),
        port,
    ]
    command = [*alone, *proxy, *map(filled, program.command)]
    return subprocess.run(
        command, cwd=file.parent, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def _free_port() -> int:
    with sockets.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize("name", AGENTS)
def test_a_program_changes_a_file_and_reads_it_back(name: str, folder: Path) -> None:
    program = AGENTS[name]
    if not (ROOT / program.folder / ".installed").exists():
        pytest.skip(f"{program.package[0]} is not installed (make clients)")
    file = folder / "work" / NOTES
    file.parent.mkdir()
    (folder / "home").mkdir()
    file.write_text(BEFORE)
    turns, plain = program.script.turns(str(file)), program.script.plain(str(file))
    model = scripted_model.save(folder / "model", turns, plain)
    with serving(model, folder / "socket", list(program.served)):
        ran = _run(name, program, folder, file)
    said = f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    assert ran.returncode == 0, said
    assert file.read_text() == AFTER, said
    assert LAST in ran.stdout, said
    entries = [json.loads(line) for line in (folder / "record").read_text().splitlines()]
    asked = [entry for entry in entries if entry["method"] == "POST"]
    assert {entry["status"] for entry in asked} == {200}
    assert {each for entry in asked for each in ignored(entry["headers"])} == program.ignored
    answers = [parts for entry in asked for parts in told(entry["path"], entry["answer"])]
    assert ["text", turns[-1]] in answers or LAST in plain[0]
    results = [entry["body"] for entry in asked if AFTER.strip() in entry["body"]]
    assert results or LAST in plain[0], "nothing was read back"
    if os.environ.get("RIDGELINE_RECORD"):
        paths = {str(file.parent): f"{HOME}/work", str(folder / "home"): HOME, str(folder): HOME, str(ROOT): "/opt"}
        kept = stored((folder / "record").read_text().splitlines(), paths)
        BODIES.mkdir(exist_ok=True)
        (BODIES / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
