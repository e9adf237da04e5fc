"""The parts of vLLM that TRL's client imports, over gloo: TRL takes the trainer's end of a transfer from vLLM, which
needs a GPU. Where they meet, and what is broadcast in which order, is as in vLLM 0.30."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan.transfer import BUFFER_BYTES, Meeting
from ridgeline.parallel.broadcast import join

VERSION = "0.30.0"
LIMIT = 60.0
MODULES = (
    *("vllm", "vllm.utils", "vllm.utils.network_utils", "vllm.distributed", "vllm.distributed.weight_transfer"),
    *("vllm.distributed.weight_transfer.nccl_common", "vllm.distributed.weight_transfer.packed_tensor"),
    "vllm.sampling_params",
)
NAMED = ("LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams")  # that TRL imports and does not use here


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Communicator:
    """As `PyNcclCommunicator`, of whose group TRL lets go at the end."""

    def __init__(self, info: dict[str, Any]) -> None:
        meeting = Meeting(info["master_address"], info["master_port"], 1, info["world_size"], LIMIT)
        self._peers = join(meeting, 0, torch.device("cpu"))
        self.group = SimpleNamespace(store=None, socket=None)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self._peers.send(tensor).wait()


def trainer_init(info: dict[str, Any]) -> Communicator:
    return Communicator(info)


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    pack: list[Tensor] = []
    for item in iterator:
        pack.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, pack)) > BUFFER_BYTES:
            group.broadcast(torch.cat(pack), src)
            pack = []
    if pack:
        group.broadcast(torch.cat(pack), src)


def install(folder: Path) -> None:
    """Let `import vllm` find these parts. folder: for what names the version."""
    info = folder / f"vllm-{VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    sys.path.insert(0, str(folder))
    for name in MODULES:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(
            __version__=VERSION,
            get_ip=get_ip,
            get_open_port=get_open_port,
            trainer_init=trainer_init,
            packed_nccl_broadcast_producer=packed_nccl_broadcast_producer,
            **dict.fromkeys(NAMED, object),
        )
        sys.modules[name] = module
