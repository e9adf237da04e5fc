"""`ridgeline kv` on a directory: what it counts, finds damaged and erases, beside a server that runs."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline.tiers.disk import DiskTier
from ridgeline.tiers.private import PrivateDirectory
from tests.tiers.test_disk import BLOCK, NAMES, content, opened, read, write


def run(*words: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["kv", *map(str, words)], catch_exceptions=False)
    assert found.exit_code == code, found.output
    return found.stdout


@pytest.fixture
def tier(tmp_path: Path):
    tier = opened(tmp_path / "kv")
    for number in range(4):
        write(tier, number, "a" if number % 2 else "")
    tier.submit_write(NAMES[9], "a", [content(9)], expires=time.time() + 0.001).result()
    yield tier
    tier.close()


def test_counts_of_a_directory_in_use(tmp_path: Path, tier: DiskTier) -> None:
    time.sleep(0.002)
    told = json.loads(run("stats", tmp_path / "kv", "--json"))
    assert (told["blocks"], told["bytes"], told["expired"], told["servers"]) == (5, 5 * BLOCK, 1, 1)
    assert sorted(told["tenants"].values()) == [2 * BLOCK, 3 * BLOCK]
    assert list(told["models"].values()) == [5 * BLOCK]
    assert "5 blocks of 160.0 KiB" in run("stats", tmp_path / "kv")
    listed = json.loads(run("list", tmp_path / "kv", "--json", "--limit", 2))
    assert listed["of"] == 5
    assert [row["bytes"] for row in listed["blocks"]] == [BLOCK, BLOCK]
    assert "2 of 5 blocks." in run("list", tmp_path / "kv", "--limit", 2)


def test_a_file_that_a_server_removes_meanwhile_is_not_counted(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = PrivateDirectory.files
    gone = f"{'0' * 16}-{'0' * 8}.seg"
    monkeypatch.setattr(PrivateDirectory, "files", lambda directory: [*names(directory), gone])
    told = json.loads(run("stats", tmp_path / "kv", "--json"))
    assert (told["blocks"], told["foreign"]) == (5, {})
    assert told["files"] == len(list((tmp_path / "kv").glob("*.seg")))


def test_verify_finds_the_damaged_block(tmp_path: Path, tier: DiskTier) -> None:
    assert "5 blocks are sound, 0 damaged" in run("verify", tmp_path / "kv")
    (file,) = (file for file in (tmp_path / "kv").glob("*.seg") if content(3) in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(content(3)[:64]) + 7] ^= 16
    file.write_bytes(data)
    told = json.loads(run("verify", tmp_path / "kv", "--json", code=1))
    assert told["sound"] == 4
    assert len(told["damaged"]) == 1


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--all"], set()),
        (["--tenant", "a"], {0, 2}),
        (["--expired"], {0, 1, 2, 3}),
        (["--older", "1000"], {0, 1, 2, 3}),
    ],
)
def test_a_purge_erases_from_the_disk_and_the_server_notices(
    tmp_path: Path, tier: DiskTier, flags: list[str], left: set[int]
) -> None:
    time.sleep(0.002)
    run("purge", tmp_path / "kv", *flags)
    assert {number for number in range(4) if read(tier, number, "a" if number % 2 else "")} == left
    tier.tick()
    assert tier.figures().blocks == len(left)
    assert tier.figures().corrupt == 0
    everything = b"".join(file.read_bytes() for file in (tmp_path / "kv").glob("*.seg"))
    assert {number for number in range(1, 4) if content(number) in everything} == left - {0}
    assert write(tier, 50)
    assert read(tier, 50)


def test_bad_input(tmp_path: Path, tier: DiskTier) -> None:
    for words, error in (
        (["purge", tmp_path / "kv"], "one of --all"),
        (["stats", tmp_path], "no KV cache's directory|open to other users"),
        (["stats", tmp_path / "nowhere"], "No such file"),
    ):
        with pytest.raises(InvalidConfig, match=error):
            run(*words)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:80 80", "ftp://127.0.0.1", "127.0.0.1:80", ""])
def test_an_address_that_is_none_is_a_mistake_of_the_user(url: str) -> None:
    with pytest.raises(InvalidConfig):
        run("--url", url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "does not answer as a server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"caches":[{}]}', "answers as another version"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer as a server"),
        # It would get the admin key: this address is not asked, else the error were that nothing listens there
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/kv\r\nContent-Length: 0\r\n\r\n", "answered 302"),
    ],
)
def test_a_server_of_another_kind_is_told_apart(answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(InvalidConfig, match=words):
            run("--url", f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_a_folder_with_a_segments_name_stops_no_purge(tmp_path: Path, tier: DiskTier) -> None:
    folder = tmp_path / "kv" / f"{'0' * 16}-{'0' * 8}.seg"
    folder.mkdir()
    run("verify", tmp_path / "kv")
    run("purge", tmp_path / "kv", "--all")
    assert json.loads(run("stats", tmp_path / "kv", "--json"))["blocks"] == 0
    assert folder.is_dir()
