"""PyTorch/XLA on a CPU: when a lazy graph is compiled and run, and what a mesh makes of it.

    pip install torch~=2.9.0 torch_xla~=2.9.0      # in an environment of its own, with Python 3.11: it needs that torch
    python -m ridgeline_bench.scripts.lazy_xla [--output FILE.jsonl] [--commit HASH]

It needs no TPU: XLA's CPU client computes, with four devices for the mesh. A line is a question with its answer,
counted by torch_xla's own metrics: graphs that were compiled, and graphs that ran. `expected` was written down before
the run.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts.asked import asked, keep

DEVICES = 4
LACKS = "there is no torch_xla here; install torch~=2.9.0 and torch_xla~=2.9.0 in an environment of their own."
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")


class Counted:
    """Graphs that were compiled and that ran since the last question."""

    def __init__(self) -> None:
        from torch_xla.debug import metrics

        self._data: Callable[[str], Any] = metrics.metric_data
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        found = (self._data(name) for name in ("CompileTime", "ExecuteTime"))
        compiled, ran = (0 if each is None else int(each[0]) for each in found)
        return compiled, ran

    def since(self) -> dict[str, int]:
        now, before = self._now(), self._before
        self._before = now
        return {"compiled": now[0] - before[0], "ran": now[1] - before[1]}


def lazy() -> Iterator[dict[str, Any]]:
    """Yield what makes a lazy graph run."""
    import torch
    import torch_xla

    device, wait = torch_xla.device(), torch_xla._XLAC._xla_wait_device_ops

    def step() -> None:
        torch_xla.sync()
        wait([])

    x, w = torch.randn(4, 8).to(device), torch.randn(8, 16).to(device)
    step()
    counted = Counted()

    def answer(question: str, compiled: int, ran: int, **more: Any) -> dict[str, Any]:
        return {"question": question, "expected": {"compiled": compiled, "ran": ran}, **counted.since(), **more}

    y = torch.relu(x @ w).sum()
    text = torch_xla._XLAC._get_xla_tensors_text([y])
    ops = re.findall(r"(?:aten|xla|prim)::\w+", text)
    yield answer("three calls are written down", 0, 0, ops=ops)
    step()
    yield answer("mark_step (torch_xla.sync)", 1, 1)
    y = torch.relu(x @ w).sum()
    step()
    yield answer("the same calls again", 0, 1)
    z = torch.relu(x @ w).sum() * 2.5
    step()
    yield answer("one more call", 1, 1)
    z = torch.relu(x @ w).sum() * 3.5
    step()
    yield answer("another number of Python in it", 0, 1)
    for length in (5, 6, 7):
        z = torch.relu(torch.ones(length, 8, device=device) @ w).sum()
        step()
    yield answer("three lengths", 3, 3)
    z = torch.relu(x @ w).sum()
    if float(z) > 0:  # the host reads it
        z = z * 2
    step()
    yield answer("a branch on a value, without and with what follows", 1, 2)
    del y, z


def mesh(dump: Path) -> Iterator[dict[str, Any]]:
    """Yield what a mesh of 2 x 2 makes of two products. dump: where XLA writes its programs."""
    import numpy as np
    import torch
    import torch_xla
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    grid = spmd.Mesh(np.arange(count), (2, count // 2), ("data", "model"))
    torch.manual_seed(0)
    plain = [torch.randn(8, 16), torch.randn(16, 32), torch.randn(32, 16)]
    x, first, second = (each.to(torch_xla.device()) for each in plain)
    spmd.mark_sharding(x, grid, ("data", None))
    spmd.mark_sharding(first, grid, (None, "model"))  # columns, then rows, as Megatron divides a feed-forward
    spmd.mark_sharding(second, grid, ("model", None))
    torch_xla.sync()
    y = torch.relu(x @ first) @ second
    torch_xla.sync()
    made = y.cpu()
    expected = torch.relu(plain[0] @ plain[1]) @ plain[2]
    programs = [path.read_text() for path in dump.glob("*after_optimizations.txt")]
    found = {name: sum(len(re.findall(rf" {name}(?:-start)?\(", text)) for text in programs) for name in COLLECTIVES}
    yield {
        "question": "a feed-forward by columns and rows over 2 x 2 devices",
        "expected": {"all-reduce": 1, "all-gather": 0, "reduce-scatter": 0, "collective-permute": 0},
        **found,
        "devices": count,
        "sharding": {
            name: torch_xla._XLAC._get_xla_sharding_spec(each)
            for name, each in (("x", x), ("first", first), ("second", second))
        },
        "largest_error": float((made - expected).abs().max()),
    }


def main() -> None:
    a = asked(__doc__, output=Path, commit="")
    try:
        versions = {name: metadata.version(name) for name in ("torch", "torch_xla")}
    except metadata.PackageNotFoundError:
        raise SystemExit(LACKS) from None
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(DEVICES), XLA_FLAGS=flags)
        lines = [*lazy()]
        for path in Path(folder).iterdir():
            path.unlink()
        lines += mesh(Path(folder))
    for line in lines:
        right = all(line[name] == value for name, value in line["expected"].items())
        told = ", ".join(f"{line[name]} {name}" for name in line["expected"])
        print(f"{'as expected' if right else 'OTHERWISE':12} {line['question']}: {told}")
        keep(a.output, {"workload": "lazy graphs of XLA", "versions": versions, "commit": a.commit, **line})


if __name__ == "__main__":
    main()
