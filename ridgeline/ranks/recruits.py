"""Processes of ranks that are started before anything is known of the model. They import torch meanwhile, as their
leader does, which takes longer than anything else when a small model starts. This module imports nothing that takes
time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from ridgeline.core.cores import available
from ridgeline.core.errors import ModelLoadError

MODULE = "ridgeline.rank_process"


class Recruit:
    """One rank's process, and the leader's end of the pair of sockets between them.

    meeting: the descriptor of a file that the process inherits. Raise ModelLoadError if no process can be started.
    """

    def __init__(self, rank: int, size: int, meeting: int) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        threads = str(max(1, available() // size))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
        with theirs:
            try:
                self.process = subprocess.Popen(
                    # -P: no file in the user's folder may stand in for a module
                    [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.PIPE,  # the other end of which closes when this process is gone (`orphan.py`)
                    pass_fds=(theirs.fileno(), meeting),
                    env={"OMP_NUM_THREADS": threads, **environment},
                    start_new_session=True,  # Ctrl-C reaches the leader alone, which then ends its ranks
                )
            except OSError as error:
                self.socket.close()
                raise ModelLoadError(
                    f"the process of rank {rank} could not be started ({error.strerror or error}); end others, or "
                    "take fewer ranks."
                ) from error

    def end(self, patience: float = 0.0) -> None:
        """Wait so many seconds for the process to end, then kill it."""
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close()


class Recruits:
    """All ranks' processes. They meet over a file without a name, of which nothing stays behind."""

    def __init__(self, size: int) -> None:
        """Start them. Raise ModelLoadError if one cannot be started."""
        self.size = size
        self.meeting = os.memfd_create("ridgeline-meeting")
        self.each: list[Recruit] = []
        try:
            for rank in range(size):
                self.each.append(Recruit(rank, size, self.meeting))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End those without a leader."""
        for recruit in self.each:
            recruit.end()
        os.close(self.meeting)
