"""E4M3 beside E5M2: range, precision and what saturation costs, as a table and a picture.

    python -m ridgeline_bench.scripts.float8        # prints the tables of docs/quantization.md, draws
        docs/images/float8.svg

The formats are those of Micikevicius et al. (arXiv 2209.05433). Their numbers are enumerated here byte by byte, and a
test compares them with torch's own types. Needs matplotlib (extra `train`).

Legend:
    N  numbers
    V  finite values of a format, ascending
    O  outputs
    I  inputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

from ridgeline.training.export import read_model
from ridgeline.weights.folder import EMBEDDED_MODEL

mpl.use("Agg")
from matplotlib import pyplot as plt

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "float8.svg"
LARGEST_INT8 = 127
OUTLIER = 256  # inputs, one of which is an outlier
SIZES = range(-24, 21)  # standard deviations of normal numbers, as powers of two


@dataclass(frozen=True)
class Float8:
    """A format of one sign bit, `exponent` bits and `mantissa` bits.

    infinities: the largest exponent stands for infinities and NaN as in IEEE 754. Otherwise only its last byte is NaN.
    """

    name: str
    exponent: int
    mantissa: int
    infinities: bool

    def value(self, byte: int) -> float:
        """Return the number that a byte stands for."""
        sign = -1.0 if byte >> 7 else 1.0
        power, steps = byte >> self.mantissa & (1 << self.exponent) - 1, byte & (1 << self.mantissa) - 1
        last, bias = (1 << self.exponent) - 1, (1 << self.exponent - 1) - 1
        if power == last and self.infinities:
            return sign * math.inf if steps == 0 else math.nan
        if power == last and steps == (1 << self.mantissa) - 1:
            return math.nan
        if power == 0:
            return sign * math.ldexp(steps, 1 - bias - self.mantissa)
        return sign * math.ldexp((1 << self.mantissa) + steps, power - bias - self.mantissa)

    def finite(self) -> list[float]:
        """Return all finite values, ascending, with zero once."""
        return sorted({value for byte in range(256) if math.isfinite(value := self.value(byte))})

    def rounded(self, x: Tensor) -> Tensor:
        """Return the nearest value of each number, the one with an even last bit where two are as near. Numbers beyond
        the largest saturate, and NaN stays NaN."""
        value_V = torch.tensor(self.finite())
        x_N = x.float().flatten()
        above_N = torch.searchsorted(value_V, x_N.nan_to_num(0.0)).clamp(1, len(value_V) - 1)
        low_N, high_N = value_V[above_N - 1], value_V[above_N]
        middle_N = (low_N + high_N) / 2
        # values alternate between even and odd, and zero, in the middle of the list, is even
        even_low_N = (above_N - 1 - len(value_V) // 2) % 2 == 0
        down_N = (x_N < middle_N) | ((x_N == middle_N) & even_low_N)
        return torch.where(x_N.isnan(), x_N, torch.where(down_N, low_N, high_N)).view_as(x)


E4M3 = Float8("E4M3", 4, 3, infinities=False)
E5M2 = Float8("E5M2", 5, 2, infinities=True)
BOTH = (E4M3, E5M2)


def facts() -> list[tuple[str, ...]]:
    """Return rows of (what, E4M3's, E5M2's)."""

    def row(what: str, of: Callable[[Float8], str]) -> tuple[str, ...]:
        return (what, *(of(each) for each in BOTH))

    def positive(each: Float8) -> list[float]:
        return [value for value in each.finite() if value > 0]

    def normal(each: Float8) -> float:
        return positive(each)[(1 << each.mantissa) - 1]

    def others(each: Float8) -> str:
        values = [each.value(byte) for byte in range(256)]
        return f"{sum(map(math.isinf, values))} infinities, {sum(map(math.isnan, values))} NaN"

    return [
        row("largest number", lambda each: f"{positive(each)[-1]:,.0f}"),
        row("least normal number", lambda each: f"2^{math.log2(normal(each)):.0f}"),
        row("least number above 0", lambda each: f"2^{math.log2(positive(each)[0]):.0f}"),
        row("largest ÷ least normal", lambda each: f"2^{math.log2(positive(each)[-1] / normal(each)):.1f}"),
        row("numbers between two powers of two", lambda each: str(1 << each.mantissa)),
        row("largest relative error of a normal number", lambda each: f"{1 / (1 + 2 ** (each.mantissa + 1)):.2%}"),
        row("other bytes", others),
    ]


def noise(rounded: Tensor, x: Tensor) -> float:
    """Return the ratio of signal to rounding noise in decibels."""
    return float(10 * torch.log10(x.square().sum() / (rounded - x).square().sum()))


def scaled(x_OI: Tensor, largest: float, round_to: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x rounded with a scale for each row, by which its largest magnitude becomes `largest`."""
    scale_O1 = x_OI.abs().amax(1, keepdim=True).clamp(min=1e-30) / largest
    return round_to(x_OI / scale_O1) * scale_O1


def measured() -> list[tuple[str, ...]]:
    """Return rows of (numbers, decibels in E4M3, E5M2 and int8), each with a scale for each row."""
    generator = torch.Generator().manual_seed(0)
    decoder = read_model(EMBEDDED_MODEL, torch.device("cpu"))
    weights = [w.detach().float() for name, w in decoder.named_parameters() if "layers" in name and w.ndim == 2]
    normal_OI = torch.randn(256, 1024, generator=generator)
    outliers_OI = normal_OI.clone()
    outliers_OI[:, ::OUTLIER] *= 60  # as in the activations of large models
    everything, others = slice(None), torch.arange(1024) % OUTLIER != 0
    rows = [
        ("the embedded model's weights", weights, everything),
        ("normal numbers", [normal_OI], everything),
        (f"normal numbers, beside one of {OUTLIER} that is 60 times as large", [outliers_OI], others),
    ]
    found = []
    for name, matrices, kept in rows:
        decibels = []
        for largest, round_to in [(each.finite()[-1], each.rounded) for each in BOTH] + [(LARGEST_INT8, torch.round)]:
            rounded = torch.cat([scaled(matrix, largest, round_to)[:, kept].flatten() for matrix in matrices])
            decibels.append(noise(rounded, torch.cat([matrix[:, kept].flatten() for matrix in matrices])))
        found.append((name, *(f"{each:.1f} dB" for each in decibels)))
    return found


def without_scale() -> dict[str, list[float]]:
    """Return the decibels of rounding normal numbers of each of SIZES without a scale, by format."""
    x_N = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    return {each.name: [noise(each.rounded(x_N * 2.0**size), x_N * 2.0**size) for size in SIZES] for each in BOTH}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> tuple[str, str]:
    """Return the tables of the page."""
    return (
        table(("", "E4M3", "E5M2"), facts()),
        table(("signal ÷ rounding noise, a scale for each row", "E4M3", "E5M2", "int8"), measured()),
    )


def draw(path: Path) -> None:
    """Draw the decibels without a scale over the size of the numbers."""
    mpl.rcParams.update({"svg.hashsalt": "ridgeline", "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for name, decibels in without_scale().items():
        axes.plot(list(SIZES), decibels, marker=".", label=name)
    axes.set(xlabel="log2 of the numbers' standard deviation", ylabel="signal ÷ noise (dB)", ylim=(0, 36))
    axes.set_title("Normal numbers rounded without a scale, saturating", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Title": "E4M3 and E5M2", "Date": None})
    plt.close(figure)


def main() -> None:
    print("\n\n".join(tables()))
    draw(PICTURE)


if __name__ == "__main__":
    main()
