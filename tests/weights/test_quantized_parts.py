"""Checkpoints of which parts are quantized: experts, modules that are left out or have schemes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.layers.linear import Linear
from ridgeline.quantization.experts import ListedWeights
from ridgeline.quantization.joined import JoinedWeight
from ridgeline.weights.convert.convert import convert
from ridgeline.weights.loader import read_model_config, stored_forms, with_cache
from ridgeline.weights.quantized.config import method_name
from tests.weights.loading import dense_logits, load
from tests.weights.quantized_files import SCHEMES, Scheme, gptq, packed, quantize, round_inputs
from tests.weights.test_quantized import IDS, assert_same_numbers, kept


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "fp8 blocks"),
        ("qwen3_moe", "fp8 static"),
        ("qwen3_moe", "awq"),
        ("mixtral", "gptq order"),
        ("mixtral", "ct nvfp4"),
        ("mixtral", "ct int8"),
        ("qwen3_moe", "modelopt mxfp8"),
        ("qwen3", "ct w4 zeros"),
    ],
)
def test_experts_keep_the_form_of_their_files(family: str, name: str, tmp_path: Path) -> None:
    folder, oracle = quantize(family, SCHEMES[name], tmp_path / "model")
    plain, decoder = load(tmp_path / "model-plain"), kept(folder)
    for parameter, tensor in plain.named_parameters():
        torch.testing.assert_close(load(folder).get_parameter(parameter), tensor, rtol=1e-6, atol=0)
        break
    assert assert_same_numbers(decoder, plain) == (4 if name == "modelopt mxfp8" else 8)  # of it experts alone
    decoder.prepare()
    if family != "qwen3":
        stack = decoder.get_submodule("layers.0.feed_forward.gate_up")
        assert isinstance(stack.matrices, ListedWeights)
    if SCHEMES[name].rounds is None:
        torch.testing.assert_close(dense_logits(decoder, IDS), oracle(IDS).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "fp8 blocks"),
        ("qwen3_next", "gptq"),
        ("qwen3_5", "gptq order"),
        ("qwen3_5", "fp8 static"),
        ("qwen3_5", "ct w4 zeros"),
    ],
)
def test_projections_that_lie_head_by_head_keep_the_form_of_their_files(family: str, name: str, tmp_path: Path) -> None:
    """Queries with their gates, and the projections of gated delta rules: every key head has its rows of each. What is
    narrower than a block of FP8 stays as it is."""
    small = ["in_proj_ba", "in_proj_a", "in_proj_b"] if name == "fp8 blocks" else []
    config = {**SCHEMES[name].config, **({"modules_to_not_convert": ["lm_head", *small]} if small else {})}
    scheme = replace(SCHEMES[name], config=config, plain=(*SCHEMES[name].plain, *small))
    folder, oracle = quantize(family, scheme, tmp_path / "model")
    plain, decoder = load(tmp_path / "model-plain"), kept(folder)
    for parameter, tensor in load(folder).named_parameters():
        torch.testing.assert_close(tensor, plain.get_parameter(parameter), rtol=1e-6, atol=0)
    assert assert_same_numbers(decoder, plain) == {"qwen3_5": 12, "qwen3_next": 16}[family]
    decoder.prepare()
    if scheme.rounds is None:
        torch.testing.assert_close(dense_logits(decoder, IDS), oracle(IDS).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_blocks_that_heads_do_not_fill_are_refused(tmp_path: Path) -> None:
    folder, _ = quantize("qwen3_next", SCHEMES["fp8 blocks"], tmp_path / "model", linear_value_head_dim=32)
    with pytest.raises(ModelLoadError, match=r"linear_attn\..* has its rows in another order .* FP8 cross"):
        kept(folder)


@pytest.fixture
def gpt_oss(tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A gpt-oss as it is shipped, and with the numbers that transformers makes of it."""
    tensors = load_file(tiny_model("gpt_oss") / "model.safetensors")
    config = json.loads((tiny_model("gpt_oss") / "config.json").read_text())
    blocks = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        shape = experts, outputs, inputs // 32
        values = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(values, scales).float()
        del blocks[name]
        blocks |= {f"{name}_blocks": values, f"{name}_scales": scales}
    for folder, own, entry in (
        (tmp_path / "mx", blocks, {"quant_method": "mxfp4"}),
        (tmp_path / "plain", tensors, None),
    ):
        folder.mkdir()
        save_file(own, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    return tmp_path / "mx", tmp_path / "plain"


@torch.no_grad()
def test_gpt_oss_keeps_its_blocks(gpt_oss: tuple[Path, Path]) -> None:
    """Gate and up alternate in the files, and are halves here."""
    decoder, plain = kept(gpt_oss[0]), load(gpt_oss[1])
    assert assert_same_numbers(decoder, plain) == 4
    decoder.prepare()
    torch.testing.assert_close(dense_logits(decoder, IDS), dense_logits(plain, IDS), rtol=1e-4, atol=1e-4)
    forms = stored_forms(gpt_oss[0], read_model_config(gpt_oss[0]), files=False)
    mxfp4 = Held(format=CodedFormat(bits=4, group=32, values="e2m1"), scales="uint8")
    assert {form.helds for form in forms.values()} == {(mxfp4,)}
    assert {form.copies for form in forms.values()} == {8}


def changed(
    name: str, plain: tuple[str, ...] = (), others: dict[str, object] | None = None, **config: object
) -> Scheme:
    base = SCHEMES[name]
    return replace(base, config={**base.config, **config}, plain=plain, others=others or {})


PARTS = {
    "awq": changed("awq", ("o_proj", "layers.1.mlp"), modules_to_not_convert=["o_proj", "model.layers.1.mlp"]),
    "fp8": changed("fp8 blocks", ("gate_proj", "up_proj"), modules_to_not_convert=["mlp.gate_proj", "mlp.up_proj"]),
    "bitsandbytes": changed(
        "bnb nf4", ("k_proj", "q_proj", "v_proj"), llm_int8_skip_modules=["q_proj", "k_proj", "v_proj"]
    ),
    "compressed-tensors": changed(
        "ct w4", ("layers.0.self_attn",), ignore=["lm_head", "re:.*layers\\.0\\.self_attn.*"]
    ),
    "gptq dynamic": changed(
        "gptq",
        ("o_proj",),
        {"down_proj": gptq(bits=8, group=64)},
        dynamic={"-:.*o_proj": {}, r"+:.*\.down_proj$": {"bits": 8, "group_size": 64}},
    ),
    "mixed parts": changed("ct w4", ("k_proj",), ignore=["re:.*k_proj"]),
    "not said": changed("gptq", ("gate_proj",)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PARTS)
def test_modules_that_are_left_out_stay_plain(name: str, tmp_path: Path) -> None:
    scheme = PARTS[name]
    folder, oracle = quantize("llama", scheme, tmp_path / "model")
    decoder = kept(folder)
    linears = {path: module for path, module in decoder.named_modules() if isinstance(module, Linear)}
    assert 0 < assert_same_numbers(decoder, load(tmp_path / "model-plain")) <= len(linears)
    decoder.prepare()
    joined = [path for path, module in linears.items() if isinstance(module.matrix, JoinedWeight)]
    wanted = {"mixed parts": "qkv", "not said": "gate_up"}.get(name)
    if name != "fp8":  # whose keys and values are narrower than a block
        assert joined == ([path for path in linears if path.endswith(wanted)] if wanted else [])
    round_inputs(oracle, replace(scheme, rounds=scheme.rounds))
    if scheme.rounds is None:
        torch.testing.assert_close(dense_logits(decoder, IDS), oracle(IDS).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_group_that_names_modules_comes_before_their_class(tmp_path: Path) -> None:
    base = SCHEMES["ct w4"].config
    eight = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    group = {**base["config_groups"]["group_0"], "targets": ["re:.*down_proj$"], "weights": eight}
    config = {**base, "config_groups": {**base["config_groups"], "group_1": group}}
    scheme = Scheme(config, SCHEMES["ct w4"].write, others={"down_proj": packed(bits=8, group=32)})
    folder, _ = quantize("llama", scheme, tmp_path / "model")
    forms = stored_forms(folder, read_model_config(folder))
    assert [forms[f"layers.0.feed_forward.{part}"].helds[0].format.bits for part in ("gate_up", "down")] == [4, 8]
    assert assert_same_numbers(kept(folder), load(tmp_path / "model-plain")) == 8


@torch.no_grad()
def test_an_output_layer_may_be_quantized(tmp_path: Path) -> None:
    folder, _ = quantize("llama", changed("gptq", lm_head=True), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    made, numbers = gptq()(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors")
    decoder = kept(folder)
    assert decoder.unembed.weight is None
    decoder.prepare()
    x = torch.eye(128)
    torch.testing.assert_close(decoder.unembed(x), numbers.T)


def test_biases_of_zeros_and_scales_of_a_cache_are_let_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = quantize("llama", SCHEMES["gptq"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    zeros = {"model.layers.0.mlp.down_proj.bias": torch.zeros(128)}
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale", "q_scale")}
    save_file({**tensors, **zeros, **scales}, folder / "model.safetensors")
    load(folder)
    assert "3 scales of a quantized KV cache (model.layers.0.self_attn.k_scale, …) are not used;" in caplog.text
    save_file({**tensors, "model.layers.0.mlp.down_proj.bias": torch.ones(128)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has no place for: model\.layers\.0\.mlp\.down_proj\.bias"):
        load(folder)


def test_the_config_may_lie_beside_or_have_an_older_name(tmp_path: Path) -> None:
    folder, _ = quantize("llama", SCHEMES["gptq"], tmp_path / "model")
    wanted = stored_forms(folder, read_model_config(folder))
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps({**config, "compression_config": own}))
    assert stored_forms(folder, read_model_config(folder)) == wanted
    del own["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert stored_forms(folder, read_model_config(folder)) == wanted
    assert len(wanted) == 8


def test_modelopt_has_a_file_of_its_own_and_may_mix_algorithms(tmp_path: Path) -> None:
    """Here FP8 in attention, NVFP4 in feed-forwards, and a cache in FP8."""
    modules = [f"model.layers.{n}.self_attn.{which}_proj" for n in (0, 1) for which in "qkvo"]
    own = {name: {"quant_algo": "FP8"} for name in modules}
    own |= {f"model.layers.{n}.mlp.{which}_proj": {"quant_algo": "NVFP4"} for n in (0, 1) for which in ("up", "gate")}
    write = SCHEMES["modelopt nvfp4"].write
    scheme = Scheme({}, write, ("down_proj",), {"self_attn": SCHEMES["modelopt fp8"].write})
    folder, _ = quantize("llama", scheme, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": own}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inner}))
    assert assert_same_numbers(kept(folder), load(tmp_path / "model-plain")) == 6
    cached = with_cache(folder, read_model_config(folder), kv_format("auto")).spec
    assert str(cached.layers[0].attention.kv_format) == "fp8_e4m3"  # each row has a scale, as the files bring none
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.pre_quant_scale"] = torch.full((128,), 2.0)  # of its inputs
    before = load(folder).get_parameter("layers.0.feed_forward.gate_up.weight").chunk(2)
    save_file(tensors, folder / "model.safetensors")
    after = load(folder).get_parameter("layers.0.feed_forward.gate_up.weight").chunk(2)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], 2 * before[1])


@pytest.mark.parametrize("name", ["gptq order", "fp8 blocks"])
def test_a_quantized_model_can_be_converted_to_plain_numbers(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("mixtral", SCHEMES[name], tmp_path / "model")
    if name == "gptq order":  # which says it in two places of older versions
        config = json.loads((folder / "config.json").read_text())
        own = config.pop("quantization_config")
        (folder / "config.json").write_text(json.dumps({**config, "compression_config": own}))
        (folder / "quantize_config.json").write_text(json.dumps(own))

    def write(source: Path, target: Path) -> None:
        raise AssertionError("a folder has its texts")

    out = tmp_path / "converted"
    convert(folder, out, dtype=None, shard_size=10**9, write_texts=write, progress=lambda what, part: None)
    assert method_name(out) is None
    ours: dict[str, Tensor] = load_file(out / "model.safetensors")
    theirs = load_file(tmp_path / "model-plain" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        torch.testing.assert_close(ours[tensor], value, rtol=1e-6, atol=0)
