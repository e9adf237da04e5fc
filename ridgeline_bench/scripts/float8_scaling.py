"""Training in FP8 with delayed and with current scales, beside float32.

    python -m ridgeline_bench.scripts.float8_scaling [--steps 300] [--device cuda] [--output results.jsonl] [--quick]

Every matrix of the layers multiplies numbers of eight bits: E4M3 in the forward pass, and E5M2 for the gradients of
outputs, as in the recipe of Micikevicius et al. (arXiv 2209.05433). A tensor needs one scale, and there are two ways to
get it:

    current    the largest magnitude of the tensor itself, which must be read once before it can be rounded
    delayed    the largest magnitude of the same operand in the last steps (1 or 16), so that rounding reads the tensor
               once and finds the next step's scale on its way. A larger number than there was saturates.

All runs see the same tokens in the same order, and begin with the same weights. Numbers are rounded to eight bits and
multiplied in float32, so a CPU shows the same losses as a GPU; speed is not measured here. --jump multiplies the
outputs' loss by a factor from the middle of the run on, as a change of the data or of the loss scale does to gradients.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import ridgeline
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.models import model_config
from ridgeline.quantization.weight import Weight
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.training.data import PackedTokens, write_tokens
from ridgeline.training.embedded import llama_config
from ridgeline.training.objective import NextTokenLoss, training_decoder
from ridgeline.training.optimizer import adamw, initialize, learning_rate
from ridgeline.training.tokenizer import SEPARATOR_ID
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.asked import asked, keep

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPSILON = 1e-6  # a largest number that was divided and multiplied again may be this much off
PEAK = 1e-3  # learning rate: with 4e-3 the runs of four layers end far from each other, whatever is rounded


@dataclass
class Scale:
    """The scale of one operand of one matrix. steps: whose magnitudes count; 0: the tensor's own."""

    dtype: torch.dtype
    steps: int
    seen: deque[Tensor] = field(init=False)
    numbers: int = 0
    saturated: Tensor | int = 0

    def __post_init__(self) -> None:
        self.seen = deque(maxlen=max(1, self.steps))

    def rounded(self, x: Tensor) -> Tensor:
        """Return the nearest numbers of eight bits times the scale. Numbers beyond the largest saturate."""
        largest = torch.finfo(self.dtype).max
        own = x.detach().abs().amax()
        known = torch.stack(list(self.seen)).amax() if self.steps and self.seen else own
        scale = torch.where(known > 0, known / largest, 1.0)
        self.seen.append(own)
        self.numbers += x.numel()
        self.saturated = self.saturated + (x.detach().abs() > known * (1 + EPSILON)).sum()
        return (x / scale).clamp(-largest, largest).to(self.dtype).to(x.dtype) * scale


class Product(torch.autograd.Function):
    """x · weightᵀ of eight bits, and both products of its backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
        x8_TI, weight8_OI = scales.x.rounded(x), scales.weight.rounded(weight)
        ctx.save_for_backward(x8_TI, weight8_OI)
        ctx.scales = scales  # type: ignore[attr-defined]
        return x8_TI @ weight8_OI.T

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x8_TI, weight8_OI = ctx.saved_tensors  # type: ignore[attr-defined]
        grad8_TO = ctx.scales.grad.rounded(grads[0])  # type: ignore[attr-defined]
        return grad8_TO @ weight8_OI, grad8_TO.flatten(0, -2).T @ x8_TI.flatten(0, -2), None


class Scales:
    """Those of a matrix: of its inputs, its weight, and the gradient of its outputs."""

    def __init__(self, steps: int) -> None:
        self.x, self.weight, self.grad = Scale(E4M3, steps), Scale(E4M3, steps), Scale(E5M2, steps)


@dataclass(frozen=True)
class Float8Weight(Weight):
    """A `Weight` that is rounded, as are its inputs and gradients, whenever it multiplies."""

    ops: Ops
    weight_OI: Tensor
    scales: Scales

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight_OI

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # this weight gives no buffer for others
        y_TO: Tensor = Product.apply(x_TI, self.weight_OI, self.scales)
        return y_TO if bias_O is None else y_TO + bias_O


def in_float8(decoder: Decoder, steps: int) -> list[Scales]:
    """Let all matrices of the layers multiply in eight bits. Return their scales."""
    made = []
    for name, module in decoder.named_modules():
        if name.startswith("layers.") and isinstance(module, Linear):
            assert module.weight is not None
            made.append(Scales(steps))
            module.multiply_with(Float8Weight(module.ops, module.weight, made[-1]))
    return made


class Outcome(NamedTuple):
    """loss: nats per token, mean of the last tenth of the steps. worst: the largest loss of any step after the first
    tenth. saturated: the shares of numbers beyond the largest one, of inputs and weights, and of gradients."""

    loss: float
    worst: float
    saturated: tuple[float, float]


def corpus(folder: Path, seq_len: int, batch: int, most: int | None = None) -> PackedTokens:
    """Return this package's own source as training text: 1 M tokens that every installation has. most: files."""
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    files = sorted(Path(ridgeline.__file__).parent.rglob("*.py"))[:most]
    write_tokens(folder / "tokens", (np.array(tokenizer.encode(file.read_text())) for file in files), SEPARATOR_ID)
    return PackedTokens(folder / "tokens", seq_len=seq_len, batch_size=batch, seed=0)


def train(data: PackedTokens, layers: int, steps: int, history: int | None, jump: float, device: str) -> Outcome:
    """Train a small Llama. history: steps whose magnitudes count (0: current scales); None: float32 throughout."""
    torch.manual_seed(0)
    config = llama_config(hidden=64 * layers, intermediate=128 * layers, layers=layers, heads=layers, kv_heads=layers)
    decoder = training_decoder(model_config(config).spec, torch.float32, torch.device(device))
    initialize(decoder, layers, seed=0)
    scales = [] if history is None else in_float8(decoder, history)
    loss_of = NextTokenLoss(decoder, batch_size=data.batch_size, chunk=32768, autocast=None)
    optimizer = adamw(decoder, lr=PEAK, weight_decay=0.1, betas=(0.9, 0.95), device=torch.device(device))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / steps, peak=PEAK, warmup=0.05)
        loss = loss_of(torch.from_numpy(data.batch(step)).to(device))
        (loss * (jump if step >= steps // 2 else 1.0)).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    taken = torch.stack(losses).tolist()
    tenth = max(1, steps // 10)
    forward = [scale for one in scales for scale in (one.x, one.weight)]
    return Outcome(
        sum(taken[-tenth:]) / tenth, max(taken[tenth:]), (_share(forward), _share([one.grad for one in scales]))
    )


def _share(scales: Sequence[Scale]) -> float:
    return sum(int(scale.saturated) for scale in scales) / max(1, sum(scale.numbers for scale in scales))


WAYS: dict[str, int | None] = {"float32": None, "current": 0, "delayed, 16 steps": 16, "delayed, 1 step": 1}


def main() -> None:
    given = asked(
        __doc__, steps=300, layers=(4, "and heads of 64"), length=(256, "tokens of a sequence"),
        batch=(16, "sequences of a step"), jump=[1.0, 64.0],
        device="cuda" if torch.cuda.is_available() else "cpu", output=Path,
        quick=(False, "twelve steps of one layer, in seconds on a CPU"),
    )  # fmt: skip
    if given.quick:
        given.steps, given.layers, given.length, given.batch = 12, 1, 64, 2
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
    with tempfile.TemporaryDirectory() as folder:
        data = corpus(Path(folder), given.length, given.batch, most=8 if given.quick else None)
        print(f"{'scales':20}{'jump':>6}{'loss':>9}{'worst':>9}{'saturated: forward':>20}{'gradients':>12}")
        for jump in given.jump:
            for way, history in WAYS.items():
                made = train(data, given.layers, given.steps, history, jump, given.device)
                shares = "".join(f"{share:{width}.4%}" for share, width in zip(made.saturated, (20, 12), strict=True))
                print(f"{way:20}{jump:6g}{made.loss:9.4f}{made.worst:9.4f}{shares}", flush=True)
                about = {"workload": "FP8 scales", "scales": way, "jump": jump, "steps": given.steps}
                about |= {"layers": given.layers, "tokens": given.length * given.batch, "device": given.device}
                keep(given.output, about | made._asdict())


if __name__ == "__main__":
    main()
