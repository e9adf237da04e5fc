"""Cases of patches, for tests and benchmarks: the views of families of models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.kernels.base.case import Cases, OpCase, generator
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.pictures.patches.cost import patches_cost
from ridgeline.kernels.pictures.views import Box, Patching, View

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RASTER = Patching("bicubic", 1 / 255, MEAN, STD, 14, 14)
SQUARES = RASTER._replace(frames=2, merge=2)
SMALL = RASTER._replace(rows=4, columns=4)


@dataclass(frozen=True)
class PatchesCase(OpCase):
    """name: what the case is. sizes: (height, width) of the pictures."""

    name: str
    sizes: tuple[tuple[int, int], ...]
    views: tuple[View, ...]
    patching: Patching

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        count = sum(3 * height * width for height, width in self.sizes)
        numbers = torch.randint(256, (count,), generator=generator(device, seed), device=device, dtype=torch.int32)
        return numbers.to(torch.uint8), self.sizes, self.views, self.patching, dtype

    @property
    def label(self) -> str:
        return f"{self.name}, {self.patching.filter}"

    def cost(self, itemsize: int) -> Cost:
        return patches_cost(self.sizes, self.views, self.patching, itemsize=itemsize)


def whole(height: int, width: int, **more: Any) -> View:
    return View(height, width, Box(0, 0, height, width), **more)


def tiles(height: int, width: int, side: int, **more: Any) -> tuple[View, ...]:
    corners = [(top, left) for top in range(0, height, side) for left in range(0, width, side)]
    return tuple(View(height, width, Box(*corner, side, side), **more) for corner in corners)


PLAIN = PatchesCase("a picture", ((37, 50),), (whole(24, 32),), SMALL)
CASES = (
    PLAIN,
    replace(PLAIN, name="larger", sizes=((9, 7),), patching=SMALL._replace(filter="lanczos")),
    replace(PLAIN, name="as it is", sizes=((24, 32),)),
    replace(PLAIN, name="far less high", sizes=((90, 40),), views=(whole(16, 32),)),
    PatchesCase("the middle", ((37, 50),), (View(24, 33, Box(-2, 4, 28, 24)),), SMALL._replace(filter="bilinear")),
    PatchesCase(
        "in a square", ((31, 50),), (whole(16, 16, box=Box(-9, 0, 50, 50), fill=(122, 116, 104)),), SMALL
    ),
    PatchesCase("a part", ((37, 50),), (whole(16, 16, box=Box(0, 25, 37, 25)), whole(16, 16)), SMALL),
    PatchesCase("zeros outside", ((37, 50),), (View(13, 20, Box(0, 0, 16, 24), fill=None),), SMALL),
    PatchesCase("tiles", ((60, 41),), (*tiles(48, 32, 16), whole(16, 16)), SMALL._replace(filter="nearest")),
    PatchesCase(
        "splits",
        ((30, 21),),
        (*tiles(32, 16, 16, via=((26, 18),)), whole(16, 16, via=((26, 18), (32, 16)))),
        SMALL._replace(filter="lanczos", rows=8, columns=8),
    ),
    PatchesCase("squares", ((37, 50),), (whole(24, 32),), SMALL._replace(frames=2, merge=2)),
    PatchesCase(
        "a video", ((20, 30),) * 3, (whole(16, 24, frames=(0, 1)), whole(16, 24, frames=(2, 2))),
        SMALL._replace(frames=2, merge=2),
    ),
    PatchesCase("channels last", ((37, 50), (12, 70)), (whole(24, 32, frames=(1,)), whole(8, 16)),
                SMALL._replace(channels_last=True, filter="bilinear")),
)  # fmt: skip

MEGAPIXEL, TWELVE = (1000, 1000), (3000, 4000)
REAL = (
    PatchesCase("Qwen's 1 MP", (MEGAPIXEL,), (whole(1008, 1008),), SQUARES),
    PatchesCase("Qwen's 12 MP", (TWELVE,), (whole(3080, 4088),), SQUARES),
    PatchesCase("Gemma 3's 12 MP", (TWELVE,), (whole(896, 896),), RASTER._replace(filter="bilinear")),
    PatchesCase("InternVL's 12 MP", (TWELVE,), (*tiles(1344, 1792, 448), whole(448, 448)), RASTER),
    PatchesCase(
        "64 pictures of 0.3 MP",
        ((480, 640),) * 64,
        tuple(whole(476, 644, frames=(number,)) for number in range(64)),
        SQUARES,
    ),
)

OP_CASES = {"patches": Cases(CASES, REAL)}
