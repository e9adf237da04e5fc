"""The id by which GPUs meet is read by comparing bytes, and NCCL is called in the order that vLLM's trainers expect.

NCCL itself needs GPUs: a stand-in writes down the calls here.
"""

from __future__ import annotations

import ctypes
import pickle
import pickletools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from ridgeline.core.plan.transfer import Announced, Meeting, TransferFailed
from ridgeline.parallel.broadcast import ID_KEY, NcclPeers, read_id

ID = bytes(range(128))
MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


def pickled(monkeypatch: pytest.MonkeyPatch, protocol: int = 4, module: str = MODULE, size: int = 128) -> bytes:
    """What vLLM's trainers store."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), kept := ModuleType(module))
    fields = [("internal", ctypes.c_byte * size)]
    kept.ncclUniqueId = type("ncclUniqueId", (ctypes.Structure,), {"_fields_": fields, "__module__": module})  # type: ignore[attr-defined]
    return pickle.dumps(kept.ncclUniqueId.from_buffer_copy(ID[:size]), protocol)


@pytest.mark.parametrize("protocol", [4, 5])
def test_the_id_is_read_from_bytes_and_from_vllms_object(monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    assert read_id(ID) == ID
    stored = pickled(monkeypatch, protocol)
    assert read_id(stored) == ID
    assert read_id(pickled(monkeypatch, module="vllm.backends.pynccl_wrapper")) == ID
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("unpickled"))
    assert read_id(stored) == ID


def test_no_other_object_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (print, ("ran",))

    stored = pickled(monkeypatch)
    cases = [
        *(b"", b"x", ID[:-1], ID + b"x", pickle.dumps(ID), pickle.dumps(Evil()), pickled(monkeypatch, 3)),
        *(stored + b"x", stored[:-1], pickled(monkeypatch, size=64)),
        stored.replace(b"_ctypes", b"os_path"),
        stored.replace(b"_unpickle", b"_unpicklf"),
        stored.replace(b"ncclUniqueId", b"ncclUniqueIe"),
        stored[:35] + bytes([stored[34] + 1]) + stored[36:],
    ]
    lengths = [at for _, argument, at in pickletools.genops(stored) if argument == MODULE]
    broken = bytearray(stored)
    broken[lengths[0] + 1] -= 1  # the length that the name claims
    for case in [*cases, bytes(broken)]:
        with pytest.raises(TransferFailed, match="in a form that is not read"):
            read_id(case)


class Library:
    """NCCL as its calls. under_way: how often a call says that it goes on. code: what the communicator becomes."""

    def __init__(self, under_way: int = 0, code: int = 0) -> None:
        self.calls, self.under_way, self.code = list[tuple[Any, ...]](), under_way, code

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == "ncclGetErrorString":
                return b"remote process exited"
            if name == "ncclCommGetAsyncError":
                self.under_way -= 1
                arguments[1]._obj.value = 7 if self.under_way > 0 else self.code
                return 0
            return 7 if self.under_way > 0 and name != "ncclCommAbort" else 0

        call.restype = None  # type: ignore[attr-defined]
        return call


class Store(dict[str, bytes]):
    def set(self, name: str, value: bytes) -> None:
        self[name] = value

    def get(self, name: str) -> bytes:  # type: ignore[override]
        return self[name]


class Stream:
    cuda_stream = 5

    def wait_stream(self, other: object) -> None:
        """Queue nothing."""


class Event:
    done = True

    def record(self, stream: object) -> None:
        """Queue nothing."""

    def query(self) -> bool:
        return self.done


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("S", (), {"wait_event": lambda s, e: None})())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def peers(library: Library, limit: float = 5.0) -> NcclPeers:
    return NcclPeers(Store({ID_KEY: ID}), Meeting("127.0.0.1", 1, 1, 3, limit), 2, torch.device("cpu"), library)


@pytest.mark.usefixtures("no_gpu")
def test_nccl_is_called_as_vllms_trainers_expect() -> None:
    library = Library(under_way=3)
    group = peers(library)
    into_B = torch.zeros(7, dtype=torch.uint8)
    group.receive(into_B).wait()
    names = [call[0] for call in library.calls if call[0] != "ncclCommGetAsyncError"]
    assert names == ["ncclCommInitRankConfig", "ncclAllReduce", "ncclBroadcast"]
    [init] = [call for call in library.calls if call[0] == "ncclCommInitRankConfig"]
    assert (init[2], bytes(init[3]), init[4]) == (3, ID, 2)
    config = init[5]._obj
    assert (config.size, config.magic, config.version, config.blocking) == (24, 0xCAFEBEEF, 21400, 0)
    [broadcast] = [call for call in library.calls if call[0] == "ncclBroadcast"]
    assert (broadcast[1].value, broadcast[3].value, broadcast[4], broadcast[5]) == (into_B.data_ptr(), 7, 1, 0)


@pytest.mark.usefixtures("no_gpu")
def test_a_trainer_that_is_gone_or_late_aborts_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    group = peers(library, limit=0.05)
    group._comm = ctypes.c_void_p(3)
    monkeypatch.setattr(Event, "done", False)
    with pytest.raises(TransferFailed, match=r"took more than 0\.05 s"):
        group.receive(torch.zeros(1, dtype=torch.uint8)).wait()
    assert library.calls[-1][0] == "ncclCommAbort"
    library.code = 6
    group._comm = ctypes.c_void_p(3)
    with pytest.raises(TransferFailed, match="remote process exited"):
        group.receive(torch.zeros(1, dtype=torch.uint8)).wait()


def test_packs_end_with_the_tensor_that_exceeds_the_buffer() -> None:
    def sizes(buffer: int) -> list[int]:
        told = Announced.of(list("abcd"), ["float32", "bfloat16", "float32", "float16"], [[3], [2, 2], [], [5]], buffer)
        return [sum(each.num_bytes for each in pack) for pack in told.packs()]

    assert sizes(0) == [12, 8, 4, 10]
    assert sizes(12) == [20, 14]
    assert sizes(11) == [12, 12, 10]
    assert sizes(34) == [34]
