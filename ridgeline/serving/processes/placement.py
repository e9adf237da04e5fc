"""The devices of each engine of a server that has several: GPUs of its own, or a share of the CPU's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import ServeConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT = "import torch; print(torch.cuda.device_count())"


def environments(config: ServeConfig) -> list[Mapping[str, str]]:
    """Return the environment of each engine's process. Raise InvalidConfig if there are too few GPUs.

    A process sees its own GPUs only, and numbers them from 0. NVML still tells their figures, because it is asked by
    what does not change, their UUIDs.
    """
    divided = LLMConfig(**config.engine)  # type: ignore[arg-type]
    replicas, ranks = config.data_parallel_size, divided.ranks
    if replicas == 1:
        return [os.environ]
    if divided.unlike_stages:
        raise InvalidConfig(
            f"pipeline_devices is {divided.pipeline_devices!r}, and data_parallel_size is {replicas}: engines side by "
            "side would share the CPU; leave one of them out."
        )
    if divided.host_bytes * replicas > (most := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise InvalidConfig(
            f"kv_offloading_size is {divided.kv_offloading_size:g} GiB for each of {replicas} engines "
            f"(data_parallel_size), and the host has {most / (1 << 30):.1f} GiB; lower it."
        )
    device = "cpu" if "cpu" in divided.stage_kinds else str(config.engine.get("device") or "auto")
    if ":" in device:
        raise InvalidConfig(f"device {device} is one GPU, and data_parallel_size is {replicas}; use device cuda.")
    count = 0 if device == "cpu" else visible_gpus()
    if count == 0 and device != "cuda":
        threads = max(1, available() // (replicas * ranks))
        return [{"OMP_NUM_THREADS": str(threads)} | os.environ] * replicas
    if count == 0:
        raise InvalidConfig(f"device {device} was asked for, but torch sees no GPU; use cpu.")
    if ranks > count:
        said = " times ".join(divided.divided_by)
        raise InvalidConfig(f"{said} is {ranks}, and torch sees {count} GPUs; lower it to {count}.")
    if replicas * ranks > count:
        each = f" of {ranks} GPUs each" if ranks > 1 else ""
        raise InvalidConfig(
            f"data_parallel_size is {replicas}{each}, and torch sees {count} GPUs; lower it to {count // ranks}."
        )
    names = os.environ.get(VISIBLE, "").split(",") if os.environ.get(VISIBLE) else [str(gpu) for gpu in range(count)]
    return [os.environ | {VISIBLE: ",".join(names[i * ranks : (i + 1) * ranks])} for i in range(replicas)]


def visible_gpus() -> int:
    """Return the number of GPUs that an engine would see. Another process looks, because looking needs torch."""
    command = [sys.executable, "-P", "-c", COUNT]
    asked = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return int(asked.stdout) if asked.returncode == 0 else 0
