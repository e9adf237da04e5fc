"""MoonViT by the formulas of the code beside Kimi-VL's files, for which transformers 5.17 has no class.

What they say: learned positions are a bicubic resize of a grid; neighbouring numbers of a head are a complex one, which
turns by the column, the next one by the row, and so on; each picture's patches see each other; squares of 2 x 2 lie
side by side behind a norm of each patch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from ridgeline.layers.encoder.grids import Grid
from tests.driving import rig
from tests.vision import tiny

WIDTH, HEADS, SIDE = 32, 2, 4


def normed(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def mapped(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"].flatten(1), weights[f"{name}.bias"])


def turned(x_THD: Tensor, rows: int, columns: int) -> Tensor:
    """Return heads whose pairs turn by columns and by rows in turn, with the frequencies of a quarter of a head."""
    width = x_THD.shape[-1]
    frequencies = 10_000.0 ** (-torch.arange(0, width, 4) / width)
    row_T, column_T = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    angles = torch.stack((column_T[:, None] * frequencies, row_T[:, None] * frequencies), dim=2).flatten(1)[:, None]
    pairs = torch.view_as_complex(x_THD.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def moonvit(weights: dict[str, Tensor], patches_TX: Tensor, rows: int, columns: int) -> Tensor:
    """Return the vectors of one picture, whose patches lie line by line."""
    tower = "vision_tower"
    grid = weights[f"{tower}.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    positions = F.interpolate(grid, (rows, columns), mode="bicubic")[0].flatten(1).T
    x = mapped(weights, f"{tower}.patch_embed.proj", patches_TX) + positions
    for layer in range(3):
        block = f"{tower}.encoder.blocks.{layer}"
        qkv = mapped(weights, f"{block}.wqkv", normed(weights, f"{block}.norm0", x)).view(len(x), 3, HEADS, -1)
        q, k, v = (qkv[:, 0], qkv[:, 1], qkv[:, 2])
        heads = (each.transpose(0, 1) for each in (turned(q, rows, columns), turned(k, rows, columns), v))
        seen = F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
        x = x + mapped(weights, f"{block}.wo", seen)
        inner = mapped(weights, f"{block}.mlp.fc0", normed(weights, f"{block}.norm1", x))
        x = x + mapped(weights, f"{block}.mlp.fc1", F.gelu(inner, approximate="tanh"))
    x = normed(weights, f"{tower}.encoder.final_layernorm", x)
    x = normed(weights, "multi_modal_projector.pre_norm", x)
    squares = x.view(rows // 2, 2, columns // 2, 2, WIDTH).transpose(1, 2).reshape(-1, 4 * WIDTH)
    inner = F.gelu(mapped(weights, "multi_modal_projector.linear_1", squares))
    return mapped(weights, "multi_modal_projector.linear_2", inner)


def test_the_tower_of_kimi_vl_follows_its_published_formulas(tiny_vision: Callable[[str], Path]) -> None:
    folder = tiny_vision("kimi_vl")
    weights = load_file(folder / "model.safetensors")
    pictures = [tiny.drawn("kimi_vl", number) for number in range(3)]
    grids = [(each.shape[0] // SIDE, each.shape[1] // SIDE) for each in pictures]
    lines = tiny.inputs("kimi_vl", pictures)["pixel_values"].flatten(1).split([r * c for r, c in grids])
    ours = [
        rows_TX.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).reshape(rows * columns, -1)
        for rows_TX, (rows, columns) in zip(lines, grids, strict=True)
    ]
    with rig(folder) as own:
        tower = own.runner.decoder.tower
        assert tower is not None
        found = tower(torch.cat(ours), [Grid(1, *each) for each in grids])
    wanted = [moonvit(weights, each, *grid) for each, grid in zip(lines, grids, strict=True)]
    # sums of at most 128 products in float32, through three layers
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-4)
