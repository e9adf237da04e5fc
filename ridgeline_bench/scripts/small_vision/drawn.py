"""Pictures and clips of colored shapes, drawn on the device by arithmetic.

Legend:
    B  pictures or clips
    F  frames
    N  shapes of a picture
    S  pixels of a side
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIDE = 32
COLORS = ((230, 60, 60), (60, 170, 80), (70, 110, 230), (240, 200, 70), (180, 80, 200), (240, 240, 240))
FORMS = ("disc", "square", "triangle", "ring")


def covered(form_N: Tensor, x_N: Tensor, y_N: Tensor, radius_N: Tensor, side: int) -> Tensor:
    """Return how much of each pixel lies in each shape: [N, S, S], 0 to 1 with soft edges."""
    at_S = torch.arange(side, device=x_N.device) + 0.5
    dx, dy, r = (
        at_S[None, None, :] - x_N[:, None, None],
        at_S[None, :, None] - y_N[:, None, None],
        radius_N[:, None, None],
    )
    far = torch.hypot(dx, dy)
    square = torch.maximum(dx.abs(), dy.abs()) - 0.85 * r
    triangle = torch.maximum(dx.abs() * math.cos(math.pi / 6) - dy / 2, dy) - r / 2
    distance = torch.stack([(far - r).expand_as(square), square, triangle, (far - 0.8 * r).abs() - 0.25 * r])
    return (0.5 - distance.gather(0, form_N.view(1, -1, 1, 1).expand(1, *square.shape))[0]).clamp(0, 1)


def pictures(count: int, generator: torch.Generator, shapes: int = 3) -> tuple[Tensor, Tensor]:
    """Return pictures [B, 3, S, S] from -1 to 1 and the form and color of the largest shape of each, as one number."""
    device, given = generator.device, {"generator": generator, "device": generator.device}
    form, color = (torch.randint(len(kind), (count, shapes), **given) for kind in (FORMS, COLORS))
    x, y = (4 + (SIDE - 8) * torch.rand(count, shapes, **given) for _ in range(2))
    radius = torch.tensor([8.0, 5.0, 3.5], device=device)[:shapes] * (0.85 + 0.3 * torch.rand(count, shapes, **given))
    # The largest one is drawn last, so that nothing covers it
    parts = covered(*(each.flatten() for each in (form, x, y, radius)), SIDE).view(count, shapes, 1, SIDE, SIDE)
    paint = torch.tensor(COLORS, device=device, dtype=torch.float32)[color] / 127.5 - 1
    found = (torch.rand(count, 3, 1, 1, **given) * 0.3 - 0.9).expand(count, 3, SIDE, SIDE)
    for n in reversed(range(shapes)):
        found = found + parts[:, n] * (paint[:, n, :, None, None] - found)
    return found, form[:, 0] * len(COLORS) + color[:, 0]


def clips(count: int, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return clips [B, F, 3, S, S] of a shape that goes by 1.5 to 2.5 pixels a frame in one of eight directions, and
    the number of the direction. It comes in at the other side, and begins anywhere, so no single frame tells it."""
    given = {"generator": generator, "device": generator.device}
    form, color = (torch.randint(len(kind), (count,), **given) for kind in (FORMS, COLORS))
    way = torch.randint(8, (count,), **given)
    speed = 1.5 + torch.rand(count, **given)
    begin = SIDE * torch.rand(2, count, **given)
    angle = way * (math.pi / 4)
    step = torch.stack([angle.cos(), angle.sin()]) * speed
    times = torch.arange(frames, device=generator.device)
    x, y = (begin[..., None] + step[..., None] * times).remainder(SIDE)  # [2, B, F]
    radius = (3.5 + torch.rand(count, **given))[:, None].expand(-1, frames)
    part = covered(form.repeat_interleave(frames), x.flatten(), y.flatten(), radius.flatten(), SIDE)
    paint = torch.tensor(COLORS, device=generator.device, dtype=torch.float32)[color] / 127.5 - 1
    found = torch.full((count, frames, 3, SIDE, SIDE), -0.8, device=generator.device)
    return found + part.view(count, frames, 1, SIDE, SIDE) * (paint[:, None, :, None, None] - found), way
