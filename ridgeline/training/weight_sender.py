"""The trainer's end of a transfer of weights into servers of this package, or of vLLM's routes.

Orders go over HTTP, and tensors beside it: by gloo from CPUs, by NCCL from GPUs. It is for trainers that have no client
of their own.

Legend:
    B  bytes
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ridgeline.core.errors import RidgelineError
from ridgeline.core.plan.transfer import BUFFER_BYTES, Announced, Meeting, TransferFailed
from ridgeline.parallel.broadcast import Arrival, TransferPeers, join, own_address


class NotObeyed(RidgelineError):
    """The server refused an order. status: of its answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class WeightSender:
    """A trainer that is in a group with the workers of a server.

    url: of the server. admin_key: of `--admin-key`. device: where tensors are sent from. address: of this machine, as
    the server reaches it (empty: the one that faces the server); the server must allow it (`--weight-transfer`). limit:
    seconds for each wait. buffer_bytes: of a pack.

    Raise NotObeyed if the server refuses, and TransferFailed if the group cannot be made.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        *,
        device: torch.device | str = "cpu",
        address: str = "",
        limit: float = 300.0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._url, self._key, self._limit, self._buffer_bytes = url.rstrip("/"), admin_key, limit, buffer_bytes
        self._device = torch.device(device)
        if not admin_key.isprintable() or any(ord(letter) > 255 for letter in admin_key):
            raise TransferFailed("the admin key has characters that no header carries; give the one of --admin-key.")
        parts = urlsplit(url)
        place = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
        address = address or own_address(socket.gethostbyname(place[0]), place[1])
        found = self.order("GET", "/get_world_size").get("world_size")
        if type(found) is not int or found < 1:
            raise TransferFailed(f"{self._url} has the world size {found!r:.40}; name a server that takes weights.")
        size = 1 + found
        meeting = Meeting(address, _free_port(address), 1, size, limit)
        info = {"master_address": address, "master_port": meeting.port, "rank_offset": 1, "world_size": size}
        info |= {"packed": True, "packed_buffer_size_bytes": buffer_bytes}
        self._peers: TransferPeers = self._beside(
            lambda: join(meeting, 0, self._device),
            lambda: self.order("POST", "/init_weight_transfer_engine", {"init_info": info}),
        )

    def send(self, tensors: Mapping[str, Tensor], version: str = "") -> str:
        """Replace the server's weights by tensors with the checkpoint's names and shapes, and return the version that
        answers name from then on. Raise NotObeyed, after which the old weights serve, and TransferFailed."""
        announced = Announced.of(
            list(tensors),
            [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            [list(each.shape) for each in tensors.values()],
            self._buffer_bytes,
        )
        info: dict[str, Any] = {
            "names": [each.name for each in announced.tensors],
            "dtype_names": [each.dtype for each in announced.tensors],
            "shapes": [each.shape for each in announced.tensors],
        }
        self.order("POST", "/start_weight_update", {})
        try:
            self._beside(
                lambda: self._broadcast(tensors, announced),
                lambda: self.order("POST", "/update_weights", {"update_info": info}),
            )
        except NotObeyed:
            self.order("POST", "/finish_weight_update", {})  # of nothing, so that the server goes on
            raise
        found = self.order("POST", "/finish_weight_update", {"weight_version": version} if version else {})
        return str(found.get("weight_version", version))

    def order(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Return the server's answer to an order. Raise NotObeyed, TransferFailed for one that is no such answer, and
        OSError if nobody is there."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=2 * self._limit) as answer:
                found = json.load(answer)
                if not isinstance(found, dict):
                    raise ValueError(f"a JSON {type(found).__name__}")
                return found
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise NotObeyed(error.code, text) from None
        except (HTTPException, ValueError) as error:  # of the address, too
            told = " ".join(f"{error}".split())[:200]
            raise TransferFailed(
                f"{self._url + path!r} gave no answer of a server that takes weights ({told})."
            ) from None

    def close(self) -> None:
        """Leave the group."""
        self._peers.close()

    def _broadcast(self, tensors: Mapping[str, Tensor], announced: Announced) -> None:
        packs = list(announced.packs())
        sizes = [sum(each.num_bytes for each in pack) for pack in packs]
        room = [torch.empty(max(sizes[i::2], default=0), dtype=torch.uint8, device=self._device) for i in range(2)]
        waits: list[Arrival] = []
        for number, pack in enumerate(packs):
            if number > 1:  # one is on its way while the next one is packed
                waits[number - 2].wait()
            sent_B, start = room[number % 2][: sizes[number]], 0
            for each in pack:
                part_B = tensors[each.name].detach().contiguous().view(-1).view(torch.uint8)
                sent_B[start : start + each.num_bytes].copy_(part_B)
                start += each.num_bytes
            waits.append(self._peers.send(sent_B))
        for arrival in waits[-2:]:
            arrival.wait()

    def _beside(self, work: Callable[[], Any], order: Callable[[], object]) -> Any:
        """Return the result of work that ends only if the server obeys an order at the same time. If the server
        refuses, nobody waits for the work, which ends with its own limit."""
        found: list[Any] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="weights", daemon=True)
        thread.start()
        order()
        thread.join(self._limit)
        if failed:
            raise failed[0]
        if not found:
            raise TransferFailed(f"the server obeyed, and the transfer took more than {self._limit:g} s.")
        return found[0]


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
