"""MXFP4: values as the specification and transformers have them, and gpt-oss in the form in which it is shipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline.core.errors import ModelLoadError
from ridgeline.text.gguf_export import write_texts
from ridgeline.weights.convert.convert import convert
from ridgeline.weights.loader import check_files, read_model_config
from ridgeline.weights.mxfp4 import dequantized
from tests.weights.loading import load


def quantized(experts: int, outputs: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks, and scales of which values of order one come."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_every_byte_at_every_scale_is_what_transformers_makes_of_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1).reshape(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).reshape(1, 255, 16).contiguous()
    ours = dequantized(blocks, scales)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


def test_values_are_those_of_the_specification() -> None:
    """OCP Microscaling Formats 1.0: E2M1 elements (table 5), the first of a byte in its low bits, E8M0 scales with bias
    127 (table 7), of which 255 is NaN."""
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    values = dequantized(blocks, torch.tensor([[128], [255]], dtype=torch.uint8))
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[0, :16].tolist() == [2 * v for v in (*positive, *(-v for v in positive))]
    assert values[1].isnan().all()


@pytest.fixture
def shipped(tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same gpt-oss twice: as it is shipped, and with the numbers that transformers makes of it."""
    tensors = load_file(tiny_model("gpt_oss") / "model.safetensors")
    config = json.loads((tiny_model("gpt_oss") / "config.json").read_text())
    plain, packed = dict(tensors), dict(tensors)
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith(("gate_up_proj", "down_proj")))):
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = quantized(experts, outputs, inputs, seed)
        plain[name] = convert_moe_packed_tensors(blocks, scales).float()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folders = tmp_path / "shipped", tmp_path / "plain"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for folder, own, entry in zip(folders, (packed, plain), (method, None), strict=True):
        folder.mkdir()
        save_file(own, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    return folders


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shipped_gpt_oss_loads_as_the_numbers_it_stands_for(shipped: tuple[Path, Path], dtype: torch.dtype) -> None:
    ours, theirs = (load(folder, dtype).state_dict() for folder in shipped)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_converted_gpt_oss_is_the_same_unquantized(shipped: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    convert(shipped[0], folder, dtype=None, shard_size=10**9, write_texts=write_texts, progress=lambda what, part: None)
    ours, theirs = load(folder).state_dict(), load(shipped[0]).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    stored = {name: tensor.dtype for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {kind for name, kind in stored.items() if name.endswith("_proj")} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda tensors, name: tensors.pop(f"{name}_scales"),
            "lacks .*gate_up_proj_scales, which config.json's MXFP4 weights need",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, :-1].contiguous()}),
            "gate_up_proj_scales of the shape .8, 63, 2., wanted .8, 64, 2.",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"].half()}),
            "gate_up_proj_scales as F16, and MXFP4 weights have U8 there",
        ),
        (
            lambda tensors, name: tensors.update(
                {f"{name}_{part}": tensors[f"{name}_{part}"][:3].contiguous() for part in ("blocks", "scales")}
            ),
            "gate_up_proj_blocks of the shape .3, 64, 2, 16., wanted .8, 64, 2, 16.",
        ),
    ],
    ids=["no scales", "too few scales", "scales of another type", "too few experts"],
)
def test_damaged_blocks_are_named(
    shipped: tuple[Path, Path], damage: Callable[[dict[str, Tensor], str], object], sentence: str
) -> None:
    folder = shipped[0]
    tensors = load_file(folder / "model.safetensors")
    damage(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=sentence):
        check_files(folder, read_model_config(folder))
