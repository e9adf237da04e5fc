"""Transfer of weights from files to a GPU at the rate of the bus.

A copy from ordinary memory reaches only a fraction of that rate, because the driver stages it through a small buffer of
its own. Here several threads read tensors (mapped files: a read is a page fault) into page-locked buffers, and each
buffer goes to the device while its thread fills the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import cycle
from threading import local

import torch
from torch import Tensor

from ridgeline.kernels.base.launch import on_device

THREADS = 6
BUFFER_BYTES = 32 << 20  # twice per thread: enough to keep the bus busy, and little enough to page-lock in a moment


class _Lane:
    """The stream and the two buffers of one thread. A buffer is free again when its event has passed."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turns: Iterator[tuple[Tensor, torch.cuda.Event]] = cycle([(b, torch.cuda.Event()) for b in buffers])

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes to bytes, at most one buffer full."""
        staged, free = next(self._turns)
        free.synchronize()
        staged[: len(source)].copy_(source)
        with torch.cuda.stream(self.stream):
            target.copy_(staged[: len(source)], non_blocking=True)
            free.record(self.stream)


def fill(targets: Iterable[tuple[Tensor, Callable[[], Tensor]]], device: torch.device) -> Iterator[int]:
    """Copy every tensor that a callable returns into its target on `device`. Yield each one's elements when it is on
    its way; all are there when the iterator ends.

    Tensors that cannot be sent as bytes (another dtype, a target that is not contiguous) are copied by torch.
    """
    lanes, inference = local(), torch.is_inference_mode_enabled()  # a mode is a thread's own
    streams: list[torch.cuda.Stream] = []

    def one(target: Tensor, read: Callable[[], Tensor]) -> int:
        # a new thread's device is the first GPU, where page-locking takes memory
        with on_device(device), torch.inference_mode(inference), torch.no_grad():
            copy(target, read())
        return target.numel()

    def copy(target: Tensor, source: Tensor) -> None:
        if not hasattr(lanes, "lane"):
            lanes.lane = _Lane(device)
            lanes.lane.stream.wait_event(before)
            streams.append(lanes.lane.stream)
        lane: _Lane = lanes.lane
        if source.dtype == target.dtype and target.is_contiguous() and source.is_contiguous():
            there, here = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
            for start in range(0, len(here), BUFFER_BYTES):
                part = slice(start, start + BUFFER_BYTES)
                lane.send(here[part], there[part])
        else:  # in the order of the source's memory, or the host would reorder it first
            order = sorted(range(source.ndim), key=source.stride, reverse=True)
            target.permute(order).copy_(source.permute(order))

    # The targets' memory may have had another use that is still under way. Nothing waits for the whole device, on which
    # another thread may be capturing
    before = torch.cuda.Event()
    before.record(torch.cuda.current_stream(device))
    with _undivided_copies():
        pool = ThreadPoolExecutor(THREADS, "ridgeline-load")
        try:
            for done in as_completed([pool.submit(one, target, read) for target, read in targets]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, the rest need not be read
    for stream in (*streams, torch.cuda.current_stream(device)):
        stream.synchronize()


@contextmanager
def _undivided_copies() -> Iterator[None]:
    """Let a copy of torch's run on the thread that calls it. By default each is divided among all processors, and those
    of several threads wait for one another: loading takes 1.4 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
