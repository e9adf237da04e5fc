"""The work of every rank when ranks divide a long prompt's tokens in a recurrent layer, measured on a CPU.

    python -m ridgeline_bench.scripts.recurrent_context [--tokens 8192] [--ranks 1 2 4 8] [--output FILE.jsonl]

The engine's own layers run, each with its projections, on the pieces that the engine would give to the ranks, one rank
after another with one thread. Two things are stand-ins: parameters are random, and what other ranks tell is zeros,
whose bytes are counted. The table shows the busiest rank: the tokens that go through its recurrent op, the seconds of
the layer, and the tokens a second of a rank in relation to those of one rank alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.core.plan.pieces import bounds_of, pieces_of
from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.core.specs.linear import LinearAttentionSpec
from ridgeline.core.specs.mamba import Mamba2Spec, MambaSpec
from ridgeline.core.specs.model import MixerSpec, NormSpec
from ridgeline.core.specs.state import RecurrentSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.scans.metadata import metadata_of
from ridgeline.layers.build import Build
from ridgeline.layers.dense import FreshRows
from ridgeline.layers.kinds import mixer
from ridgeline.parallel.scan import PieceScan
from ridgeline.quantization.scheme import everywhere, scheme
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import asked
from ridgeline_bench.scripts.context_parallel import Counting

CPU, WIDTH = torch.device("cpu"), 2048
NORM = NormSpec(eps=1e-5)
LAYERS: dict[str, tuple[str, MixerSpec]] = {  # the shapes of published models of this width
    "Mamba-2 1.3B": (
        "ssd",
        Mamba2Spec(heads=64, head_dim=64, groups=1, state_width=128, length=4, norm=NORM),
    ),
    "Mamba 1.4B": ("selective_scan", MambaSpec(channels=4096, state_width=16, rank=128, length=4)),
    "GLA 1.3B": ("linear_attention", LinearAttentionSpec(heads=4, key_dim=256, value_dim=512, norm=NORM, rank=16)),
    "Qwen3-Next": (
        "gated_delta",
        GatedDeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, length=4, norm=NORM),
    ),
}


class Scanned(Ops):
    """Ops of which one counts the tokens that it runs."""

    def __init__(self, counted: str) -> None:
        super().__init__(Platform(device_type="cpu"))
        self.tokens, run = 0, getattr(self, counted)

        def op(first_T: Tensor, *others: object) -> Tensor:
            self.tokens += len(first_T)
            found: Tensor = run(first_T, *others)
            return found

        setattr(self, counted, op)


def layer_of(spec: MixerSpec, ops: Ops) -> nn.Module:
    """Return a layer with random parameters, whose states decay about as trained ones do."""
    generator = torch.Generator().manual_seed(0)
    layer = mixer(spec, WIDTH, Build(ops, torch.float32, CPU, everywhere(scheme(None))))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 and "rate" not in name else 1.0
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if name.endswith("dt_bias"):
                parameter.sub_(4)
    return layer


def one_rank(spec: MixerSpec, layer: nn.Module, ring: Counting, tokens: int) -> float:
    """Return the seconds that a layer takes one rank, the faster of two runs."""
    bounds = bounds_of(tokens, ring.size)
    count = bounds[ring.rank + 1] - bounds[ring.rank]
    metadata = metadata_of([tokens], CPU, fresh=(0,))
    [state] = spec.states
    assert isinstance(state, RecurrentSpec)
    shapes = [(part.shape, torch.float32) for part in state.parts]
    x_TM = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    position_T, seconds = torch.arange(bounds[ring.rank], bounds[ring.rank + 1]), []
    for _ in range(2):
        ring.received = 0
        scan = PieceScan(ring, list(pieces_of([tokens], [0], bounds)), CPU) if ring.size > 1 else None
        parts = tuple(torch.zeros(5, *shape, dtype=dtype) for shape, dtype in shapes)
        begin = time.process_time()
        layer(None, x_TM, None, position_T, FreshRows(parts, replace(metadata, divided=scan)))
        seconds.append(time.process_time() - begin)
    return min(seconds)


def measured(name: str, ranks: Sequence[int], tokens: int, tell: Callable[[str], None]) -> list[dict[str, object]]:
    """Return a row for each number of ranks."""
    counted, spec = LAYERS[name]
    ops = Scanned(counted)
    layer, found, alone = layer_of(spec, ops), list[dict[str, object]](), 0.0
    for size in ranks:
        each, received, scanned = [], [], []
        for rank in range(size):
            ring, ops.tokens = Counting(rank, size), 0
            each.append(one_rank(spec, layer, ring, tokens))
            scanned.append(ops.tokens // 2)
            received.append(ring.received)
        rate = tokens / max(each) / size
        alone = alone or rate * ranks[0]
        row: dict[str, object] = {
            "layer": name,
            "ranks": size,
            "tokens": tokens,
            "tokens_through_the_op": max(scanned),
            "seconds": max(each),
            "bytes_received": max(received),
            "tokens_per_second_and_rank": rate,
            "part_of_one_rank": rate / alone,
        }
        found.append(row)
        tell(
            f"{name:>13} {size:>5} {max(scanned):>8,} {max(each):>8.3f} {max(received) / 2**20:>9.1f} {rate:>9.0f} "
            f"{rate / alone:>6.2f}"
        )
    return found


def main() -> None:
    given = asked(__doc__, tokens=8192, ranks=[1, 2, 4, 8], output=Path)
    torch.set_num_threads(1)
    print(f"a prompt of {given.tokens:,} tokens, one layer of width {WIDTH}, float32, the busiest rank")
    print(f"{'layer':>13} {'ranks':>5} {'through':>8} {'seconds':>8} {'MiB told':>9} {'tok/s':>9} {'part':>6}")
    with torch.inference_mode():
        lines = [line for name in LAYERS for line in measured(name, given.ranks, given.tokens, print)]
    if given.output is not None:
        append_lines(given.output, lines)


if __name__ == "__main__":
    main()
