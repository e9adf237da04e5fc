"""A step of training whose peak falls: activations of some layers wait in the host's memory, and the allocator is set.

    torchrun --nproc-per-node 2 -m ridgeline_bench.scripts.allocator.step [--model benchmarks/models/llama-1b]
        [--length 4096] [--sequences 4] [--shares 0 0.25 0.5 0.75 1] [--steps 4] [--recompute]
        [--output FILE.jsonl] [--commit HASH]                             # without torchrun: one process, one GPU

The decoder is divided by ZeRO's stage 3 (`ridgeline.training.sharded`), over one process too. For each share of layers
(`ridgeline.training.offload`) it begins with the same weights and reads the same tokens, and the losses must be those
of the first share. A share that is named twice says how far two equal runs differ, since sums of attention's gradients
have no fixed order on a GPU. Two steps are not timed: kernels are compiled, and AdamW makes its moments. Then come
--steps that are timed, and one of which torch records every event of the allocator.

PYTORCH_ALLOC_CONF sets the allocator of a run, and a line says how. peak_allocated and peak_reserved are bytes of the
first process; sent are bytes of activations that went to the host in a step.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.training.base import opened
from ridgeline.training.conversations import Example
from ridgeline.training.offload import OffloadedActivations
from ridgeline.training.sharded import LossPack, PackLoss, sharded_loss
from ridgeline.training.tuned import WIDE_CHUNK, recompute
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.allocator.server import Watched, stored
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

WARM = 2
NEAR = 1e-3  # of the loss; two bfloat16 runs differ in some roundings


@contextmanager
def processes(device_type: str) -> Iterator[torch.device]:
    """Join torchrun's processes, or be the only one. Yield the device of this one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


class TrainedSteps:
    """Steps of AdamW on random tokens, from weights of a fixed seed."""

    def __init__(self, given: Any, device: torch.device, share: float) -> None:
        model = read_model_config(Path(given.model))
        torch.manual_seed(0)
        decoder = opened(Path(given.model), model, "full", torch.float32, device, load_format="dummy")
        if given.recompute:
            recompute(decoder)
        self.offloaded = OffloadedActivations(decoder, share)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.loss: PackLoss = sharded_loss(decoder, WIDE_CHUNK, dtype)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=1e-5, fused=device.type == "cuda")
        draw = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randint(model.spec.vocab_size, (given.sequences, given.length + 1), generator=draw).tolist()
        counted = (False, *(True,) * given.length)
        self.pack = LossPack([Example(tuple(row), counted, 0) for row in rows])

    def step(self) -> float:
        """Make a step, wait for it, and return its loss on this process."""
        loss = self.loss(self.pack)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def measured(given: Any, device: torch.device, share: float) -> dict[str, Any]:
    """Return the figures of a share of layers."""
    on_gpu = device.type == "cuda"
    gc.collect()
    steps = TrainedSteps(given, device, share)
    losses = [steps.step() for _ in range(WARM)]
    if on_gpu:
        torch.cuda.empty_cache()  # of the warm steps and the start
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(given.steps):
        began = time.perf_counter()
        losses.append(steps.step())
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "losses": losses, "seconds": median(seconds), "each": seconds, "sent": steps.offloaded.num_bytes,
    }  # fmt: skip
    if on_gpu:
        stats = torch.cuda.memory_stats()
        found |= {f"peak_{name}": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}
        found["retries"] = stats["num_alloc_retries"]
        watched = Watched()
        steps.step()
        found["step"] = stored(watched.stretch())
        watched.close()
    return found


def main() -> None:
    a = asked(
        __doc__, model="benchmarks/models/llama-1b", length=4096, sequences=4, steps=4, recompute=False,
        shares=([0.0, 0.25, 0.5, 0.75, 1.0], "of layers"), device="cuda" if torch.cuda.is_available() else "cpu",
        output=Path, commit="",
    )  # fmt: skip
    with told(), processes(a.device) as device:
        check_counts(a, "length", "sequences", "steps")
        here, first = asdict(host_with(device, a.commit)), None
        for share in a.shares:
            found = measured(a, device, share)
            first = first or found
            setting = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
            apart = max(abs(a - b) for a, b in zip(found["losses"], first["losses"], strict=True))
            line = {
                "machine": here, "workload": "allocator of a training step", "model": Path(a.model).name,
                "processes": dist.get_world_size(), "length": a.length, "sequences": a.sequences,
                "recompute": a.recompute, "setting": setting, "share": share, "losses_apart": apart, **found,
            }  # fmt: skip
            if dist.get_rank() == 0:
                keep(a.output, line)
                peaks = [f"{found.get(f'peak_{name}', 0) / 1e9:6.2f}" for name in ("allocated", "reserved")]
                print(
                    f"{setting or 'native'} share {share:g}: {1e3 * found['seconds']:.0f} ms a step, "
                    f"peak {' GB, held '.join(peaks)} GB, sent {found['sent'] / 1e9:.2f} GB, "
                    f"losses {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}, {apart:.1g} apart",
                    flush=True,
                )
            if not apart <= NEAR * first["losses"][0]:
                raise SystemExit(f"the losses of share {share} are {apart:g} away from those of share {a.shares[0]}.")


if __name__ == "__main__":
    main()
