"""Quantized checkpoints with something wrong in them: one sentence that names the tensor, and never anything else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.loader import check_files, read_model_config, stored_forms
from tests.weights.loading import load
from tests.weights.quantized_files import SCHEMES, quantize
from tests.weights.test_quantized import kept

Damage = Callable[[dict[str, Tensor], str], Any]
BASE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`whole(scheme)`: a model of one layer in this format."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            place = tmp_path_factory.mktemp("whole") / "model"
            found[name], _ = quantize("llama", SCHEMES[name], place, num_hidden_layers=1)
        return found[name]

    return folder


@pytest.fixture
def copy(whole: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(whole(name), tmp_path / "model"))


def refusal(folder: Path, *, headers: bool = False) -> str:
    """The sentence that loading ends with, or already the look at the headers."""
    with pytest.raises(ModelLoadError) as caught:
        check_files(folder, read_model_config(folder)) if headers else load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def damaged(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tensors_of(name: str, whole: Callable[[str], Path]) -> list[str]:
    """The quantized tensors of one module."""
    return [key for key in load_file(whole(name) / "model.safetensors") if key.startswith(BASE)]


OPTIONAL = (
    "pre_quant_scale",
    "act_pre_scale",
    "g_idx",
    "qzeros",
    "weight_shape",
    "weight_format",
    "input_global_scale",
    "workspace",
    "input_zero_point",
)
UNUSED = ("modelopt nvfp4", "modelopt nvfp4 awq", "ct int8 static", "ct int8 zeros")  # their scales of activations


@pytest.mark.parametrize("name", SCHEMES)
def test_headers_are_checked_before_anything_is_read(name: str, whole: Any, copy: Any) -> None:
    """Each tensor of a module missing, cut, of one more dimension, or of another type."""
    folder = copy(name)
    kept = load_file(folder / "model.safetensors")
    for key in tensors_of(name, whole):
        for damage in ("gone", "cut", "deep", "type"):
            tensors = dict(kept)
            if damage == "gone":
                del tensors[key]
                if key.endswith("_weight_zero_point") and name.startswith("torchao int8"):
                    continue  # symmetric
                if key.endswith(OPTIONAL) or (key.endswith("input_scale") and name in UNUSED):
                    continue
            elif damage == "cut" and tensors[key].numel() > 1:
                tensors[key] = tensors[key][:-1].contiguous()
            elif damage == "deep":
                tensors[key] = tensors[key][None, None, None].contiguous()
            else:
                tensors[key] = torch.zeros(tensors[key].shape, dtype=torch.bool)
            save_file(tensors, folder / "model.safetensors")
            if damage == "cut" and "quant_state" in key:
                assert "is no JSON" in refusal(folder)
                continue
            message = refusal(folder, headers=True)
            assert key in message, (damage, message)


SCALES = {
    "fp8 static": ("weight_scale", "input_scale"),
    "fp8 blocks": ("weight_scale_inv",),
    "ct fp8 channel": ("weight_scale",),
    "ct int8": ("weight_scale",),
    "ct w4": ("weight_scale",),
    "ct nvfp4": ("weight_global_scale",),
    "gptq": ("scales",),
    "awq": ("scales",),
    "gptq marlin": ("s",),
    "awq gemv": ("scales",),
    "modelopt fp8": ("weight_scale", "input_scale"),
    "modelopt nvfp4": ("weight_scale_2",),
    "modelopt int4 awq": ("weight_scale",),
    "quark int4 zeros": ("weight_scale",),
    "torchao int4": ("_weight_scale",),
    "torchao int8": ("_weight_scale",),
    "auto-round": ("scales",),
    "quark fp8 channel": ("weight_scale", "input_scale"),
    "bnb int8": ("SCB",),
    "bnb nf4": ("weight.absmax",),
    "bnb nf4 nested": ("weight.nested_absmax",),
}


@pytest.mark.parametrize("name", ["modelopt nvfp4", "ct nvfp4", "quark mxfp4"])
def test_scales_of_few_bits_are_numbers(name: str, copy: Any) -> None:
    key, nan = f"{BASE}.weight_scale", 255 if name == "quark mxfp4" else 127
    folder = damaged(copy(name), lambda tensors: tensors[key].view(torch.uint8)[0, :2].fill_(nan))
    assert re.search(f"{re.escape(key)} holds 2 scales (like|that are) nan", refusal(folder), re.I)


@pytest.mark.parametrize(
    ("family", "name", "key", "owner", "nan"),
    [
        ("llama", "fp8 static", "self_attn.k_proj", "qkv", 0x7F),
        ("llama", "fp8 blocks", "mlp.down_proj", "down", 0xFF),
        ("qwen3_moe", "modelopt mxfp8", "mlp.experts.1.up_proj", "gate_up", 0xFF),
    ],
)
def test_numbers_of_eight_bits_are_numbers(
    family: str, name: str, key: str, owner: str, nan: int, tmp_path: Path
) -> None:
    """Beside NaN the largest magnitudes are numbers."""
    folder, _ = quantize(family, SCHEMES[name], tmp_path / "model", num_hidden_layers=1)
    key = f"model.layers.0.{key}.weight"
    kept(damaged(folder, lambda tensors: tensors[key].view(torch.uint8)[0, :2].fill_(nan - 1)))
    damaged(folder, lambda tensors: tensors[key].view(torch.uint8)[-1, -1:].fill_(nan))
    with pytest.raises(ModelLoadError, match=rf"model holds numbers of layers\.0\.\S*{owner} that are NaN; copy it"):
        kept(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_numbers_above_zero(name: str, value: float, copy: Any) -> None:
    for part in SCALES[name]:
        folder = copy(name) if part == SCALES[name][0] else folder  # noqa: F821 (of the first turn)
        key = f"{BASE}.{part}"
        original = load_file(folder / "model.safetensors")[key].clone()
        damaged(folder, lambda tensors, key=key: tensors[key].view(-1)[:1].fill_(value))
        if value == 0 and name.startswith("bnb"):  # a block of zeros has the scale 0 there
            load(folder)
            continue
        message = refusal(folder)
        assert key in message
        assert "scales must be" in message
        damaged(folder, lambda tensors, key=key, original=original: tensors.update({key: original}))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gptq", {"group_size": 96}, "256 inputs, which groups of 96 do not divide|128 inputs, which groups of 96"),
        ("gptq", {"group_size": 13}, "group_size to 13; it must be a multiple of 8"),
        ("gptq", {"bits": 8}, r"qweight of the shape \[\d+, \d+\], wanted"),
        ("gptq", {"bits": 5}, "bits to 5; it must be one of 2, 3, 4, 8"),
        ("gptq", {"checkpoint_format": "bitblas"}, "checkpoint_format to 'bitblas'"),
        ("gptq marlin", {"sym": False}, "checkpoint_format to 'marlin'; it must be gptq unless bits is 4, sym true"),
        ("gptq", {"quant_method": "hqq"}, "quantization method 'hqq', which is not read; known are fp8"),
        ("gptq", {"quant_method": "vptq"}, "quantization method 'vptq', which is not read"),
        ("awq", {"version": "gemv_fast"}, "version to 'gemv_fast'; it must be gemm or gemv"),
        ("auto-round", {"packing_format": "auto_round:fp8"}, "packing_format to 'auto_round:fp8'; it must be one of"),
        ("auto-round", {"data_type": "mx_fp"}, "data_type to 'mx_fp'; it must be one of int"),
        ("auto-round zeros", {"packing_format": "auto_round"}, "sym to False; it must be true for what is packed as"),
        ("modelopt fp8", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo to 'W4A8_AWQ'; it must be one of"),
        ("modelopt nvfp4", {"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size to 32; it must"),
        ("modelopt fp8", {"quantization": {"quant_algo": "MIXED_PRECISION"}}, "quantized_layers to None"),
        (
            "quark fp8",
            {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_channel"}}},
            "in int4 per_channel",
        ),
        ("awq", {"bits": 3}, "bits to 3"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, r"weight_block_size to \[64, 64\]; it must be \[128, 128\]"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt to 'e5m2'"),
        ("ct w4", {"format": "marlin-24"}, "format to 'marlin-24'"),
        ("ct w4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        ("ct w4", {"config_groups": {}}, "config_groups"),
        ("bnb nf4", {"load_in_8bit": True}, "load_in_4bit"),
        ("bnb nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ],
    ids=str,
)
def test_what_a_config_must_not_say(name: str, change: dict[str, Any], sentence: str, copy: Any) -> None:
    folder = copy(name)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(sentence, refusal(folder, headers=True))


def test_a_scheme_of_a_group_is_refused_with_its_name(copy: Any) -> None:
    folder = copy("ct w4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= {"num_bits": 16, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert "weights in int16 by group of 32 as pack-quantized, which we do not read" in refusal(folder, headers=True)


def test_groups_of_unlike_sizes_are_no_order(copy: Any) -> None:
    folder = damaged(copy("gptq order"), lambda tensors: tensors[f"{BASE}.g_idx"].fill_(0))
    assert f"{BASE}.g_idx does not put 32 inputs into each group" in refusal(folder)


def test_projections_that_are_multiplied_as_one_share_their_order(copy: Any) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].flip(0)

    folder = damaged(copy("gptq order"), swap)
    load(folder)  # as plain numbers it has no order
    with pytest.raises(ModelLoadError, match=r"k_proj has another order of inputs than .*q_proj"):
        kept(folder)


JUNK = [None, -1, 0, 3, 1e400, "x", "re:(", [], ["re:["], [1], {}, {"a": 1}, True]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _places(value[key], (*path, key))


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 blocks", "ct fp8 block", "ct w4", "ct nvfp4", "gptq order", "awq", "bnb nf4 nested"),
        *("modelopt nvfp4", "auto-round", "quark mxfp4"),
    ],
)
def test_any_entry_of_a_config_may_be_junk(name: str, copy: Any) -> None:
    """The model is loaded or refused with a sentence, whatever stands in a quantization config."""
    folder = copy(name)
    config = json.loads((folder / "config.json").read_text())
    plain, refused = 0, 0
    for path in _places(config["quantization_config"]):
        for junk in JUNK:
            changed = json.loads(json.dumps(config["quantization_config"]))
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = junk
            (folder / "config.json").write_text(json.dumps({**config, "quantization_config": changed}))
            try:
                check_files(folder, model := read_model_config(folder))
                stored_forms(folder, model, files=False)
                plain += 1
            except ModelLoadError as error:
                assert str(error).endswith(".")  # noqa: PT017 (either outcome is right)
                refused += 1
    assert min(plain, refused) > 2
