"""Classes of failed collectives: real failures over gloo, and NCCL's words as torch prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.parallel.failures import CLASSES, described, failure_of

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5\n{}: {}"
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=64, "
    "NumelOut=64, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)
WORDS = {
    NCCL.format("unhandled cuda error", "ncclUnhandledCudaError", "Call to CUDA function failed."): "cuda",
    NCCL.format("unhandled system error", "ncclSystemError", "System call (e.g. socket, malloc) failed."): "system",
    NCCL.format("internal error", "ncclInternalError", "Internal check failed."): "internal",
    NCCL.format("invalid argument", "ncclInvalidArgument", "Invalid value for an argument."): "argument",
    NCCL.format("invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank 0 and rank 1"): "usage",
    NCCL.format("remote process exited or there was a network error", "ncclRemoteError", "A call failed"): "peer lost",
    TIMEOUT: "timeout",
    f"NCCL communicator was aborted on rank 1. Original reason for failure was: {TIMEOUT}": "timeout",
    "NCCL communicator was aborted on rank 0.": "communicator",
    "Detected mismatch between collectives on ranks. Rank 0 is running ALLREDUCE in ProcessGroupNCCL": "mismatch",
    "[enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch?": "mismatch",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1": "peer lost",
    "rank 1 read '/models/nccl/a' before: NCCL communicator was aborted on rank 1.": "communicator",
}


@pytest.mark.parametrize(("words", "name"), WORDS.items())
def test_words_have_their_class(words: str, name: str) -> None:
    found = failure_of(RuntimeError(words))
    assert found is not None
    assert found.name == name
    assert described(RuntimeError(words)).endswith(f"[collective, {name}: {found.cause}]")


def test_other_errors_stay_as_they_are() -> None:
    for error in (
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("The size of tensor a (4) must match the size of tensor b (5)"),
        TimeoutError("timed out"),
        OSError("/models/nccl/config.json: Connection refused"),
        RuntimeError("reading /mnt/gloo/model.safetensors:12 timed out"),
        RuntimeError("the folder 'nccl-8b' has an invalid argument"),
        ValueError('"process-group-nccl" is an invalid argument for --model'),
        RuntimeError("hub://team/c10d.cpp: Connection reset by peer"),
        ValueError("x"),
    ):
        assert failure_of(error) is None
        assert described(error) == f"{type(error).__name__}: {error}"


def provoked(rank: int, part: str, folder: Path) -> dict[str, str]:
    """Return the words of what each provoked failure of one part raises on this rank. Groups that hang or lose a rank
    are not ended: that may abort the process."""
    found: dict[str, str] = {}

    def joined() -> None:
        store = dist.FileStore(str(folder / f"{part} store"), 2)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def late() -> None:
        if rank == 0:  # the other one waits until the first has given up
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.wait(timedelta(seconds=0.3))
        else:
            while not (folder / "given up").exists():
                time.sleep(0.01)

    def tried(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:
            found[name] = described(error)

    joined()
    if part == "a rank that hangs":
        tried(part, late)
        (folder / "given up").touch()
    elif part == "a rank that dies":
        if rank == 0:
            tried(part, lambda: dist.all_reduce(torch.ones(4)))
    else:
        tried("unlike shapes", lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(4)))
        tried("unlike dtypes", lambda: dist.all_gather([torch.empty(4, dtype=torch.int32)] * 2, torch.ones(4)))
        tried("joined again", joined)
        dist.destroy_process_group()
        tried("after the end", lambda: dist.all_reduce(torch.ones(4)))
    return found


PARTS = ("calls that do not fit", "a rank that hangs", "a rank that dies")


def forked(folder: Path) -> None:
    """Provoke the failures of all parts. gloo aborts a process now and then whose peer ends; such a part is tried
    again."""
    for part in PARTS:
        for attempt in range(4):
            ended = []
            for rank in (0, 1):
                if not os.fork():
                    own = folder / f"{part}, attempt {attempt}"
                    own.mkdir(exist_ok=True)
                    (folder / f"{part} {rank}").write_text(json.dumps(provoked(rank, part, own)))
                    os._exit(0)
            for _ in (0, 1):
                ended.append(os.wait()[1])
            if not any(ended):
                break
        assert not any(ended), f"{part}: ranks ended with status {ended}"


@pytest.mark.dealt
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forks of a process that has imported torch")
def test_real_failures_have_their_class(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.parallel.test_failures import forked; "
    # Not the environment that other tests of this process have left
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [sys.executable, "-c", f"{code} forked(Path(sys.argv[1]))", str(tmp_path)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert not run.returncode, run.stderr
    first, second = (
        {name: words for part in PARTS for name, words in json.loads((tmp_path / f"{part} {rank}").read_text()).items()}
        for rank in (0, 1)
    )
    expected = {
        "unlike shapes": "mismatch",
        "unlike dtypes": "mismatch",
        "joined again": "communicator",
        "a rank that hangs": "timeout",
        "after the end": "communicator",
        "a rank that dies": "peer lost",
    }
    assert {name: words.rpartition("[collective, ")[2].partition(":")[0] for name, words in first.items()} == expected
    assert set(second) == {"unlike shapes", "unlike dtypes", "joined again", "after the end"}


def test_the_page_has_every_class() -> None:
    page = (Path(__file__).parents[2] / "docs/communication.md").read_text()
    for found, _ in CLASSES:
        assert f"| {found.name} |" in page
