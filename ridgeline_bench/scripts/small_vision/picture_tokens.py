"""What a picture becomes: continuous patches, codes of patches, or 32 codes of the whole picture.

    python -m ridgeline_bench.scripts.small_vision.picture_tokens [--steps 3000] [--batch 128] [--width 128]
        [--layers 4] [--codes 1024] [--pictures 2048] [--seed 0] [--forms patches "patch codes" "32 codes"]
        [--output FILE.jsonl] [--sample PICTURE.png]

An encoder and a decoder of one size learn to draw pictures of 32 x 32 pixels again. Between them lies what a language
model would get:

    patches      64 vectors of 16 numbers, one for each 4 x 4 pixels
    patch codes  64 codes (VQ-VAE, arXiv 1711.00937): each vector is the nearest one of a table of --codes
    32 codes     32 codes of learned queries that see the whole picture (TiTok, arXiv 2406.07550)

Tables follow the vectors by a moving mean, and entries that nothing uses begin anew at a vector of the batch. The error
is that of --pictures others. "kind" is what a linear map of the tokens' mean, trained behind it, says of the largest
shape's form and color: 24 kinds. Bits are 16 a number for vectors, and log2 of the table's size for codes. A form's
line is stored once it is measured; small networks leave most of a GPU idle, so forms can run in processes of their own.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, told
from ridgeline_bench.scripts.small_vision.drawn import COLORS, FORMS, SIDE, pictures
from ridgeline_bench.scripts.small_vision.network import HEAD, blocks, trained
from ridgeline_bench.svg import Panel
from ridgeline_bench.svg import picture as drawing

PATCH, DIM = 4, 16
PLACES = (SIDE // PATCH) ** 2
KINDS = {"patches": (PLACES, False), "patch codes": (PLACES, True), "32 codes": (32, True)}


class CodeTable(nn.Module):
    """A table of vectors that follows what is looked up in it."""

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.vectors_CD: Tensor
        self.sums_CD: Tensor
        self.counts_C: Tensor
        for name, value in (("vectors_CD", torch.randn(codes, DIM)), ("sums_CD", torch.zeros(codes, DIM))):
            self.register_buffer(name, value)
        self.register_buffer("counts_C", torch.zeros(codes))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nearest vectors, with the gradient of what was given, their numbers, and the loss that keeps what
        is given near them."""
        index_T = (self.vectors_CD.square().sum(1) - 2 * x_TD.detach() @ self.vectors_CD.T).argmin(1)
        if self.training:
            self._follow(x_TD.detach(), index_T)
        found_TD = self.vectors_CD[index_T]
        return x_TD + (found_TD - x_TD).detach(), index_T, (x_TD - found_TD).square().mean()

    @torch.no_grad()
    def _follow(self, x_TD: Tensor, index_T: Tensor) -> None:
        counts_C = torch.zeros_like(self.counts_C).index_add_(0, index_T, torch.ones_like(x_TD[:, 0]))
        self.counts_C.lerp_(counts_C, 0.02)
        self.sums_CD.lerp_(torch.zeros_like(self.sums_CD).index_add_(0, index_T, x_TD), 0.02)
        used_C = self.counts_C > 0.02
        fresh_CD = x_TD[torch.randint(len(x_TD), (len(used_C),), device=x_TD.device)]
        means_CD = self.sums_CD / self.counts_C.clamp(min=1e-6)[:, None]
        self.vectors_CD.copy_(torch.where(used_C[:, None], means_CD, fresh_CD))
        self.counts_C.copy_(torch.where(used_C, self.counts_C, 1.0))
        self.sums_CD.copy_(torch.where(used_C[:, None], self.sums_CD, fresh_CD))


class PictureTokens(nn.Module):
    """Pictures to tokens and back."""

    def __init__(self, tokens: int, coded: bool, width: int, layers: int, codes: int) -> None:
        super().__init__()
        self.tokens, whole = tokens, tokens != PLACES
        self.patch, self.pixels = nn.Linear(3 * PATCH**2, width), nn.Linear(width, 3 * PATCH**2)
        self.into, self.out_of = nn.Linear(width, DIM), nn.Linear(DIM, width)
        self.places = nn.ParameterList(nn.Parameter(0.02 * torch.randn(PLACES, width)) for _ in range(2))
        # queries of the encoder, and their places in the decoder, which draws in the places of patches
        self.queries = nn.ParameterList(nn.Parameter(0.02 * torch.randn(tokens, width)) for _ in range(2 * whole))
        self.encoder, self.decoder = blocks(width, layers), blocks(width, layers)
        self.table = CodeTable(codes) if coded else None

    def encoded(self, picture_BCSS: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the tokens [B, tokens, DIM], their codes, and the loss of the table."""
        cut = picture_BCSS.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        x = self.patch(cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)) + self.places[0]
        if self.queries:
            x = torch.cat([x, self.queries[0].expand(len(x), -1, -1)], 1)
        x = self.into(self.encoder(x)[:, -self.tokens :])
        if self.table is None:
            return x, None, x.new_zeros(())
        found, index, loss = self.table(x.flatten(0, 1))
        return found.view_as(x), index.view(x.shape[:2]), loss

    def decoded(self, token_BTD: Tensor) -> Tensor:
        """Return pictures."""
        x = self.out_of(token_BTD)
        if self.queries:
            x = torch.cat([self.places[1].expand(len(x), -1, -1), x + self.queries[1]], 1)
        else:
            x = x + self.places[1]
        side = SIDE // PATCH
        x = self.pixels(self.decoder(x)[:, :PLACES]).view(-1, side, side, 3, PATCH, PATCH)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, SIDE, SIDE)


def kinds_right(model: PictureTokens, given: Any, drawn: torch.Generator, others: torch.Generator) -> float:
    """Train a linear map from the tokens' mean and their squares' to the largest shape's kind; return its share that is
    right on other pictures."""
    head = nn.Linear(2 * DIM, len(FORMS) * len(COLORS)).to(drawn.device)

    def features(picture: Tensor) -> Tensor:
        with torch.no_grad():
            token = model.encoded(picture)[0]
        return torch.cat([token.mean(1), token.square().mean(1)], 1)

    def loss() -> Tensor:
        picture, kind = pictures(given.batch, drawn)
        return nn.functional.cross_entropy(head(features(picture)), kind)

    trained(head, loss, given.steps // 4, 2e-2, lambda step, value: None)
    right = 0
    with torch.inference_mode():
        for _ in range(given.pictures // given.batch):
            picture, kind = pictures(given.batch, others)
            right += int((head(features(picture)).argmax(1) == kind).sum())
    return right / (given.pictures // given.batch * given.batch)


def measured(name: str, given: Any, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Return the line of a form, and eight pictures drawn again."""
    tokens, coded = KINDS[name]
    torch.manual_seed(given.seed)
    model = PictureTokens(tokens, coded, given.width, given.layers, given.codes).to(device)
    drawn, others = (torch.Generator(device).manual_seed(given.seed + n) for n in (0, 1_000_003))

    def loss() -> Tensor:
        picture, _ = pictures(given.batch, drawn)
        token, _, own = model.encoded(picture)
        return (model.decoded(token) - picture).square().mean() + 0.25 * own

    started = time.perf_counter()
    trained(model.train(), loss, given.steps, 1e-3, lambda step, value: None)
    model.eval()
    error, used, sample = 0.0, set[int](), torch.empty(0)
    with torch.inference_mode():
        for _ in range(given.pictures // given.batch):
            picture, _ = pictures(given.batch, others)
            token, index, _ = model.encoded(picture)
            again = model.decoded(token).clamp(-1, 1)
            error += float((again - picture).square().mean())
            used |= set() if index is None else set(index.unique().tolist())
            sample = torch.cat([picture[:8], again[:8]])
    error /= given.pictures // given.batch
    line = {
        "workload": "picture tokens", "form": name, "tokens": tokens, "used": len(used), "codes": given.codes * coded,
        "bits": tokens * (math.log2(given.codes) if coded else 16 * DIM), "psnr": 10 * math.log10(4 / error),
        "kinds": kinds_right(model, given, drawn, others), "train_s": time.perf_counter() - started,
        "steps": given.steps, "seed": given.seed,
    }  # fmt: skip
    print(f"{name:>12} {tokens:>7} {line['bits']:>8,.0f} {line['used']:>6} {line['psnr']:>8.1f} {line['kinds']:>7.1%} "
          f"{line['train_s']:>8.1f}", flush=True)  # fmt: skip
    return line, sample


def write_sample(rows: list[Tensor], path: Path) -> None:
    """Write eight pictures, and below them what each form made of them."""
    from PIL import Image

    lines = [rows[0][:8], *(each[8:] for each in rows)]
    whole = torch.cat([torch.cat(list(each), dim=2) for each in lines], dim=1)
    pixels = ((whole + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).resize((pixels.shape[1] * 3, pixels.shape[0] * 3), Image.Resampling.NEAREST).save(path)


def drawn_forms(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw what each form of tokens costs and holds."""
    panels = [
        Panel("PSNR of pictures drawn again, dB", "bits of a picture", _points(lines, "bits", "psnr")),
        Panel("kind that a linear map reads, share right", "tokens of a picture", _points(lines, "tokens", "kinds")),
    ]
    path.write_text(drawing(panels, "vectors of patches, codes of patches, and 32 codes"))


def _points(lines: list[dict[str, Any]], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    return {line["form"]: [(float(line[x]), float(line[y]))] for line in lines}


def main() -> None:
    given = asked(
        __doc__, steps=3000, batch=128, width=128, layers=4, codes=1024, pictures=2048, seed=0, forms=[OneOf(KINDS)],
        output=Path, sample=Path,
    )  # fmt: skip
    with told():
        check_counts(given, "steps", "batch", "width", "layers", "codes", "pictures")
        if given.width % HEAD or given.pictures < given.batch or given.steps < 4:
            raise InvalidConfig(
                f"--width must be a multiple of {HEAD}, --pictures at least --batch and --steps at least 4, got "
                f"{given.width}, {given.pictures}, {given.batch} and {given.steps}."
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'':>12} {'tokens':>7} {'bits':>8} {'used':>6} {'PSNR dB':>8} {'kind':>7} {'seconds':>8}")
    samples = list[Tensor]()
    for name in given.forms:
        line, sample = measured(name, given, device)
        samples.append(sample)
        if given.output is not None:
            append_lines(given.output, [line])
    if given.sample is not None:
        write_sample(samples, given.sample)


if __name__ == "__main__":
    main()
