"""The time in which new weights get into an engine that runs: of the same process, and of a server beside it.

    python -m ridgeline_bench.scripts.weight_push [--model FOLDER] [--rounds 5] [--device cuda] [--output FILE]

FOLDER has a config.json; the default is Llama-3.1-8B's shape. Weights are random. In the first part tensors on the
engine's own device are copied (`LLM.update_weights`). In the second a trainer on another device sends them to
`ridgeline serve`, by NCCL between two GPUs or gloo on a CPU. It needs two GPUs; with one the second part is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import ridgeline
from ridgeline.training.weight_sender import WeightSender
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import checkpoint_views, empty_decoder, read_model_config
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.served import Served

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"
KEY = "a-trainers-key"


def tensors_of(folder: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random weights with the checkpoint's names and shapes."""
    model = read_model_config(folder)
    views = checkpoint_views(empty_decoder(model.spec), model.weights)
    return {name: torch.randn(view.shape, device=device, dtype=dtype) * 0.02 for name, view in views.items()}


def timed(push: Callable[[], object], rounds: int, device: str) -> list[float]:
    """Return the seconds of each round but the first, in which memory is taken."""
    found = []
    for _ in range(rounds + 1):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        push()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found[1:]


def main() -> None:
    a = asked(
        __doc__, model=("", "a folder with a config.json; default: Llama-3.1-8B's shape"), rounds=5, device="cuda",
        output=("", "a file of results"),
    )  # fmt: skip
    folder = Path(a.model) if a.model else SHAPES / "llama-8b"
    gpus = torch.cuda.device_count() if a.device != "cpu" else 0
    here, there = ("cuda:0", "cuda:1") if gpus > 1 else (a.device, a.device)
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 2048, "kv_cache_memory": 1 << 30}
    output = Path(a.output) if a.output else None

    def tell(what: str, seconds: list[float], num_bytes: int) -> None:
        line = {
            "kind": "weight push", "what": what, "model": folder.name, "bytes": num_bytes,
            "ms": [round(1e3 * each, 2) for each in seconds], "median_ms": round(1e3 * median(seconds), 2),
            "gb_per_s": round(num_bytes / median(seconds) / 1e9, 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        keep(output, line)

    llm = ridgeline.LLM(folder, skip_tokenizer_init=True, device=a.device, **options)
    dtype = getattr(torch, llm.assembly.dtype)
    tensors = tensors_of(folder, here, dtype)
    size = sum(each.nbytes for each in tensors.values())
    tell("one device", timed(lambda: llm.update_weights(tensors), a.rounds, a.device), size)
    llm.shutdown()
    if gpus == 1:
        print("there is one GPU, so nothing is sent to another")
        return
    tensors = {name: each.to(there) for name, each in tensors.items()}
    flags = ["--max-model-len", "2048", "--kv-cache-memory", str(1 << 30), "--load-format", "dummy"]
    flags += ["--device", a.device, "--dtype", str(dtype).removeprefix("torch.")]
    flags += ["--tokenizer", os.fspath(EMBEDDED_MODEL)]
    with Served(str(folder), *flags, "--admin-key", KEY, "--weight-transfer", "127.0.0.0/8") as server:
        sender = WeightSender(server.url, KEY, device=there)
        tell("another process", timed(lambda: sender.send(tensors), a.rounds, a.device), size)
        sender.close()


if __name__ == "__main__":
    main()
