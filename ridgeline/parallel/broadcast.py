"""The group of a trainer and of the workers that it sends weights to: gloo on CPUs, NCCL on GPUs.

It is none of torch's default group, which a process has once, and ranks join it while they run. They meet at the
trainer's `TCPStore`, as vLLM's workers do. On GPUs the trainer leaves NCCL's id there. vLLM's trainers leave it as a
pickled object, of which one form is read by comparing bytes: nothing is unpickled.

Legend:
    B  bytes
"""

from __future__ import annotations

import ctypes
import re
import socket
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.core.plan.transfer import Meeting, TransferFailed

ID_KEY = "broadcast_from/0/0"
GLOO = "ridgeline/gloo"
ID_BYTES = 128
CONNECTING = 60.0  # seconds at most until the trainer's store is there
POLL = 50e-6  # seconds between looks at what runs on a GPU
_NAME = rb"\x94\x8c(?P<length>.)(?P<module>[A-Za-z_][A-Za-z0-9_.]{0,120})\x94\x8c\x0cncclUniqueId\x94\x93\x94"
_PICKLED = re.compile(
    rb"\x80[\x04\x05]\x95.{8}\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93" + _NAME + rb"}\x94C\x80(?P<id>.{128})"
    rb"\x94\x86\x94\x86\x94R\x94\.",
    re.DOTALL,
)


class Arrival(Protocol):
    """Bytes that are on their way."""

    def wait(self) -> None:
        """Wait until they are there. Raise TransferFailed."""


class TransferPeers(Protocol):
    """The group, as a rank of it sees it."""

    def receive(self, into_B: Tensor) -> Arrival:
        """Begin to receive bytes from the trainer, in order."""

    def send(self, bytes_B: Tensor) -> Arrival:
        """Begin to send bytes to all others, as the trainer."""

    def close(self) -> None: ...


def read_id(stored: bytes) -> bytes:
    """Return the id in what a trainer has stored: its 128 bytes, or the pickled object of vLLM's class. Raise
    TransferFailed for anything else."""
    if len(stored) == ID_BYTES:
        return stored
    found = _PICKLED.fullmatch(stored)
    if found is None or found["length"][0] != len(found["module"]):
        raise TransferFailed(
            f"the trainer's NCCL id has {len(stored)} bytes in a form that is not read; send its {ID_BYTES} bytes, or "
            "vLLM's ncclUniqueId."
        )
    return found["id"]


def join(meeting: Meeting, rank: int, device: torch.device) -> TransferPeers:
    """Return the group, which this process joins as `rank`. Rank 0 is the trainer, whose store the others find at the
    address. Raise TransferFailed."""
    where = f"{meeting.address}:{meeting.port}"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            meeting.address,
            meeting.port,
            meeting.size,
            is_master=rank == 0,
            timeout=timedelta(seconds=meeting.limit if rank == 0 else min(meeting.limit, CONNECTING)),
            use_libuv=False,
        )
        if device.type == "cuda":
            return NcclPeers(store, meeting, rank, device)
        return GlooPeers(store, meeting, rank)
    except (RuntimeError, OSError) as error:
        raise TransferFailed(f"the trainer at {where} could not be met ({_first_line(error)}); begin again.") from error


class GlooPeers:
    """The group on CPUs."""

    def __init__(self, store: Any, meeting: Meeting, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=meeting.limit)
        own = own_address(meeting.address, meeting.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        self._store, self._limit = store, timedelta(seconds=meeting.limit)
        places = dist.PrefixStore(GLOO, store)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(places, rank, meeting.size, options)

    def receive(self, into_B: Tensor) -> Arrival:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._limit
        return _GlooArrival(self._group.broadcast([into_B], options), self._limit)

    send = receive

    def close(self) -> None:
        self._group = self._store = None


class _GlooArrival:
    def __init__(self, work: Any, limit: timedelta) -> None:
        self._work, self._limit = work, limit

    def wait(self) -> None:
        try:
            self._work.wait(self._limit)
        except RuntimeError as error:
            raise TransferFailed(f"the trainer is gone or late ({_first_line(error)}); begin again.") from error


class _Config(ctypes.Structure):
    """The first fields of `ncclConfig_t`, as of version 2.14, from which on calls need not wait. Later ones then have
    their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class NcclPeers:
    """The group on GPUs, by calls of NCCL itself: torch's groups cannot take an id that comes from elsewhere. No call
    waits, so a trainer that dies or is late is noticed, and the communicator is aborted."""

    DONE, UNDER_WAY, UINT8, SUM, FLOAT32 = 0, 7, 1, 0, 7

    def __init__(self, store: Any, meeting: Meeting, rank: int, device: torch.device, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self._limit, self._rank, self._device, self._store = meeting.limit, rank, device, store
        self._comm = ctypes.c_void_p()
        if rank == 0:
            own = _Id()
            self._check(self._library.ncclGetUniqueId(ctypes.byref(own)), "ncclGetUniqueId")
            stored = bytes(own)
            store.set(ID_KEY, stored)
        else:
            stored = bytes(store.get(ID_KEY))
        unique = _Id.from_buffer_copy(read_id(stored))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            code = self._library.ncclCommInitRankConfig(
                ctypes.byref(self._comm), meeting.size, unique, rank, ctypes.byref(config)
            )
            self._settle(code, "ncclCommInitRankConfig")
            warm = torch.zeros(1, device=device)  # vLLM's groups begin with this sum
            self._stream.wait_stream(torch.cuda.current_stream(device))
            pointer = ctypes.c_void_p(warm.data_ptr())
            code = self._library.ncclAllReduce(
                pointer, pointer, ctypes.c_size_t(1), self.FLOAT32, self.SUM, self._comm, self._on_stream
            )
            self._settle(code, "ncclAllReduce")
            _NcclArrival(self, warm).wait()

    @property
    def _on_stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)

    def receive(self, into_B: Tensor) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what read the buffer has ended then
        into_B.record_stream(self._stream)
        pointer = ctypes.c_void_p(into_B.data_ptr())
        code = self._library.ncclBroadcast(
            pointer, pointer, ctypes.c_size_t(into_B.numel()), self.UINT8, 0, self._comm, self._on_stream
        )
        self._settle(code, "ncclBroadcast")
        return _NcclArrival(self, into_B)

    send = receive

    def close(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)
        self._store = None

    def state(self) -> int:
        """Return the code of what the communicator does now."""
        code = ctypes.c_int(self.DONE)
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(code)), "ncclCommGetAsyncError")
        return code.value

    def _settle(self, code: int, what: str) -> None:
        """Wait until a call that does not wait has done its part on the host."""
        until = time.monotonic() + self._limit
        while code == self.UNDER_WAY:
            if time.monotonic() > until:
                self._fail(f"{what} took more than {self._limit:g} s")
            time.sleep(POLL)
            code = self.state()
        self._check(code, what)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the stream has come to an event."""
        until = time.monotonic() + self._limit
        while not event.query():
            if (code := self.state()) not in (self.DONE, self.UNDER_WAY):
                self._check(code, "a broadcast")
            if time.monotonic() > until:
                self._fail(f"a broadcast took more than {self._limit:g} s")
            time.sleep(POLL)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind what was queued."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _check(self, code: int, what: str) -> None:
        if code not in (self.DONE, self.UNDER_WAY):
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            words = self._library.ncclGetErrorString(code)
            self._fail(f"{what}: {(words or b'unknown').decode(errors='replace')}")

    def _fail(self, why: str) -> None:
        self.close()
        raise TransferFailed(f"the trainer is gone or late ({why}); begin again.")


class _NcclArrival:
    def __init__(self, peers: NcclPeers, buffer: Tensor) -> None:
        self._peers, self._event, self._buffer = peers, peers.mark(), buffer

    def wait(self) -> None:
        self._peers.wait(self._event)
        torch.cuda.current_stream(self._buffer.device).wait_event(self._event)


def own_address(address: str, port: int) -> str:
    """Return the address of this machine that another one can reach, which has that address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # nothing is sent
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] ", "", first).partition(". ")[0][:200]  # without a library's path
