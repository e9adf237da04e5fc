"""Where a server's sockets lie, what killed servers leave there, and limits that are too low to begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.serving.processes.runtime import LEAST_DESCRIPTORS, OWNER, RuntimeDirectory, sweep

LIMITED = ["sh", "-c", f'ulimit -Sn $0; ulimit -Hn $1; shift; exec {sys.executable} "$@"']  # soft, hard, arguments
HOLD = """
import sys, time
from ridgeline.serving.processes.runtime import RuntimeDirectory
directory = RuntimeDirectory()
directory.socket(0).touch()
print(directory.path, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def hold() -> tuple[subprocess.Popen[str], Path]:
    """A process with such a directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_next_server_removes_what_a_killed_one_left_and_nothing_else(folder: Path) -> None:
    living, its = hold()
    killed, left = hold()
    kill(killed)
    assert left.parent == its.parent == folder
    (folder / "ridgeline-notes").mkdir()  # the user's own
    (folder / "ridgeline-notes" / "text").write_text("mine")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).write_text("1\n")
    (folder / "ridgeline-link").symlink_to(elsewhere)
    for name, kind in (("ridgeline-linked", "symlink"), ("ridgeline-fifo", "fifo")):
        (folder / name).mkdir()
        owner = folder / name / OWNER
        owner.symlink_to(elsewhere / OWNER) if kind == "symlink" else os.mkfifo(owner)
    try:
        own = RuntimeDirectory()
        assert not left.exists()
        assert (its / "engine-0").exists()
        assert (folder / "ridgeline-notes" / "text").read_text() == "mine"
        assert (elsewhere / OWNER).read_text() == "1\n"
        assert {path.name for path in folder.iterdir()} == {
            *("ridgeline-notes", "elsewhere", "ridgeline-link", "ridgeline-linked", "ridgeline-fifo"),
            *(its.name, own.path.name),
        }
        sweep(folder)
        assert own.path.exists()  # of this very process
        own.remove()
        assert not own.path.exists()
    finally:
        kill(living)


def test_what_is_not_ours_in_such_a_directory_stays(folder: Path) -> None:
    killed, left = hold()
    kill(killed)
    (left / "precious").write_text("mine")
    sweep(folder)
    assert [path.name for path in left.iterdir()] == ["precious"]


def test_a_directory_is_for_its_user_alone(folder: Path) -> None:
    directory = RuntimeDirectory()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()


@pytest.mark.parametrize("most", [16, LEAST_DESCRIPTORS - 1])
def test_too_few_descriptors_are_told_in_one_sentence(most: int) -> None:
    ended = subprocess.run(
        [*LIMITED, str(most), str(most), "-m", "ridgeline", "serve", "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert f"may open {most} files" in ended.stderr
    assert "ulimit -n" in ended.stderr


@pytest.mark.dealt
def test_just_enough_descriptors_are_enough(folder: Path) -> None:
    """A soft limit is raised as far as it may be."""
    process = subprocess.Popen(
        [*LIMITED, "16", str(LEAST_DESCRIPTORS), "-m", "ridgeline", "serve", "--port", "0", "--no-access-log"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Ready: ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
    assert not list(folder.iterdir())
