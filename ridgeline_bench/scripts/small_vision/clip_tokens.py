"""Frames by themselves against tubelets: which tokens can tell where a shape of a clip goes?

    python -m ridgeline_bench.scripts.small_vision.clip_tokens [--steps 1500] [--batch 64] [--frames 8] [--width 96]
        [--layers 4] [--clips 2048] [--seed 0] [--output FILE.jsonl]

A tower of one size reads clips of 32 x 32 pixels and says in which of eight directions a shape goes. It begins
anywhere, so one frame alone says nothing. Patches have 8 x 8 pixels. The forms differ in what a token is and sees:

    frames, alone       a token is a patch of a frame, and sees its frame; frames are averaged
    tubelets, alone     a token is the same patch of two frames (a linear map of both), and sees its pair; likewise
    frames, all         a token is a patch of a frame, and sees all frames, by learned positions of time
    tubelets, all       a token is that of two frames, and sees all of them

All are trained on the same clips, which are drawn anew for each step, and measured on --clips others (chance: 12.5 %).
FLOPs are those of one clip's layers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import asked, check_counts, told
from ridgeline_bench.scripts.small_vision.drawn import SIDE, clips
from ridgeline_bench.scripts.small_vision.network import HEAD, block_flops, blocks, trained
from ridgeline_bench.svg import Panel, picture

PATCH = 8
PLACES = (SIDE // PATCH) ** 2


class ClipTower(nn.Module):
    """A tower over tokens of `span` frames. together: tokens of all frames see each other."""

    def __init__(self, span: int, together: bool, frames: int, width: int, layers: int) -> None:
        super().__init__()
        self.span, self.together = span, together
        self.patch = nn.Linear(3 * span * PATCH**2, width)
        self.place = nn.Parameter(0.02 * torch.randn(PLACES, width))
        self.time = nn.Parameter(0.02 * torch.randn(frames // span, 1, width)) if together else None
        self.layers, self.head = blocks(width, layers), nn.Linear(width, 8)

    def forward(self, clip_BFCSS: Tensor) -> Tensor:
        """Return the scores of the eight directions."""
        cut = clip_BFCSS.unflatten(1, (-1, self.span)).unfold(4, PATCH, PATCH).unfold(5, PATCH, PATCH)
        x = self.patch(cut.permute(0, 1, 4, 5, 2, 3, 6, 7).flatten(4).flatten(2, 3)) + self.place
        if self.time is not None:
            x = x + self.time
        count = len(x)
        x = self.layers(x.flatten(1, 2) if self.together else x.flatten(0, 1))
        scores: Tensor = self.head(x.reshape(count, -1, x.shape[-1]).mean(1))
        return scores


FORMS = {
    "frames, alone": (1, False),
    "tubelets, alone": (2, False),
    "frames, all": (1, True),
    "tubelets, all": (2, True),
}


def measured(name: str, given: Any, device: torch.device) -> dict[str, Any]:
    span, together = FORMS[name]
    torch.manual_seed(given.seed)
    tower = ClipTower(span, together, given.frames, given.width, given.layers).to(device)
    drawn = torch.Generator(device).manual_seed(given.seed)

    def loss() -> Tensor:
        clip, way = clips(given.batch, given.frames, drawn)
        return nn.functional.cross_entropy(tower(clip), way)

    started = time.perf_counter()
    trained(tower, loss, given.steps, 1e-3, lambda step, value: None)
    with torch.inference_mode():
        others = torch.Generator(device).manual_seed(given.seed + 1_000_003)
        right = 0
        for _ in range(given.clips // given.batch):
            clip, way = clips(given.batch, given.frames, others)
            right += int((tower(clip).argmax(1) == way).sum())
    tokens = given.frames // span * PLACES
    groups = 1 if together else given.frames // span
    line = {
        "workload": "clip tokens", "form": name, "tokens": tokens, "frames": given.frames, "steps": given.steps,
        "mflops": groups * block_flops(given.width, given.layers, tokens // groups) / 1e6,
        "accuracy": right / (given.clips // given.batch * given.batch), "train_s": time.perf_counter() - started,
        "seed": given.seed,
    }  # fmt: skip
    print(f"{name:>16} {tokens:>7} {line['mflops']:>8.1f} {line['accuracy']:>9.1%} {line['train_s']:>8.1f}", flush=True)
    return line


def drawn_forms(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw stored lines: what is right over the cost of a clip, and over its tokens. Each form is a point."""

    def points(name: str) -> dict[str, list[tuple[float, float]]]:
        return {each["form"]: [(each[name], 100 * each["accuracy"])] for each in lines}

    panels = [
        Panel("directions told right, %", "MFLOP a clip", points("mflops")),
        Panel("directions told right, %", "tokens a clip", points("tokens")),
    ]
    path.write_text(picture(panels, "frames and tubelets: in which of eight directions a shape goes"))


def main() -> None:
    given = asked(__doc__, steps=1500, batch=64, frames=8, width=96, layers=4, clips=2048, seed=0, output=Path)
    with told():
        check_counts(given, "steps", "batch", "frames", "width", "layers", "clips")
        if given.frames % 2 or given.width % HEAD or given.clips < given.batch:
            raise InvalidConfig(
                f"--frames must be even, --width a multiple of {HEAD} and --clips at least --batch, got "
                f"{given.frames}, {given.width}, {given.clips} and {given.batch}."
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'':>16} {'tokens':>7} {'MFLOPs':>8} {'right':>9} {'seconds':>8}")
    lines = [measured(name, given, device) for name in FORMS]
    if given.output is not None:
        append_lines(given.output, lines)


if __name__ == "__main__":
    main()
