"""Models divided over several ranks give the logits of the undivided model, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import ExpertStack
from ridgeline.layers.linear import Linear
from ridgeline.parallel.mesh import Mesh
from ridgeline.weights.loader import fill_dummy, load_weights, read_model_config, with_cache
from tests import gguf_files, tiny_models
from tests.parallel.divided import CPU, OPS, divides, kept, logits, numbers_of
from tests.parallel.threads import ThreadAxis, on_ranks
from tests.weights.quantized_files import SCHEMES, quantize
from tests.weights.test_kv_scales import scales_of, with_scales

ACT_ORDER = [name for name in SCHEMES if "order" in name] + ["gptq 8 zeros", "gptq 3"]  # quantized with act order
MIXTURES = [family for family in tiny_models.ATTENDING if "moe" in family or family in ("mixtral", "olmoe", "gpt_oss")]


@pytest.mark.few(33)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", tiny_models.ATTENDING)
def test_ranks_together_score_as_one_device(family: str, tp: int, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    if not divides(folder, tp):
        pytest.skip(f"{tp} ranks do not divide this model's heads or columns")
    want = logits(folder, Mesh())

    def rank(axis: ThreadAxis) -> Tensor:
        return logits(folder, Mesh(tp=axis))

    for got in on_ranks(tp, rank):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("tp", [2, 4])  # with two key heads, which four ranks have twice
def test_gates_of_attention_are_divided_with_their_heads(tp: int, tmp_path: Path) -> None:
    tiny_models.save("qwen3_5", tmp_path, layer_types=["full_attention"] * 3, attention_bias=True)
    want = logits(tmp_path, Mesh())
    for got in on_ranks(tp, lambda axis: logits(tmp_path, Mesh(tp=axis))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("family", MIXTURES)
def test_ranks_that_divide_experts_score_as_one_device(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    want = logits(folder, Mesh())
    ranks = 4 if divides(folder, 4, whole_experts=True) else 2
    if not divides(folder, ranks, whole_experts=True):
        pytest.skip(f"{ranks} ranks do not divide this model's experts")
    for got in on_ranks(ranks, lambda axis: logits(folder, Mesh(tp=axis, whole_experts=True))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_make_up_other_numbers_for_what_they_divide(
    whole_experts: bool, tiny_model: Callable[[str], Path]
) -> None:
    """And the same ones for what each of them holds: they must choose the same experts."""
    model = read_model_config(tiny_model("qwen3_moe"))

    def made_up(axis: ThreadAxis) -> dict[str, Tensor]:
        mesh = Mesh(tp=axis, whole_experts=whole_experts)
        decoder = Decoder(model.spec, OPS, dtype=torch.float32, device=CPU, max_positions=64, mesh=mesh)
        fill_dummy(decoder, 5)
        return dict(decoder.named_parameters())

    first, second = on_ranks(2, made_up)
    shared = {name for name in first if "router" in name or "norm" in name}
    assert any("router" in name for name in shared)
    for name in first:
        assert torch.equal(first[name], second[name]) == (name in shared), name


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
def test_quantized_gates_are_divided_in_their_form(name: str, tmp_path: Path) -> None:
    """Every rank holds the gates and queries of its heads."""
    layers = {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 2, "intermediate_size": 512}
    folder, _ = quantize("qwen3_5", SCHEMES[name], tmp_path / "model", **layers)
    whole = kept(folder, Mesh())
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))
    for path, module in whole.named_modules():
        if path.endswith("mixer.qkv"):
            gated, keys, _ = module.parts
            rows = (gated // 4, gated // 4, keys // 2, keys // 2)  # of gates, queries, keys and values
            pieces = [numbers_of(each.get_submodule(path)).split(rows) for each in parts]
            joined = torch.cat([torch.cat(each) for each in zip(*pieces, strict=True)])
            torch.testing.assert_close(joined, numbers_of(module))


@pytest.mark.few(24)
@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_weights_are_divided_in_their_form(name: str, tmp_path: Path) -> None:
    """Every rank holds its rows and columns of the files' numbers."""
    wide = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}  # some schemes treat layers unlike
    folder, _ = quantize("llama", SCHEMES[name], tmp_path / "model", **wide)
    whole = kept(folder, Mesh())
    if name in ACT_ORDER:
        with pytest.raises(ModelLoadError, match="was quantized in an order of its inputs"):
            on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))
        return
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))
    assert_divided(whole, parts)


def assert_divided(whole: Decoder, parts: list[Decoder]) -> None:
    for path, module in whole.named_modules():
        if not isinstance(module, Linear) or not module.fillings:
            continue
        own = [part.get_submodule(path) for part in parts]
        if module.inputs > own[0].inputs:  # divided by inputs
            torch.testing.assert_close(torch.cat([numbers_of(each) for each in own], 1), numbers_of(module))
            continue
        by_part = [numbers_of(each).split(each.parts) for each in own]  # q, k and v, each divided
        joined = torch.cat([torch.cat(pieces) for pieces in zip(*by_part, strict=True)])
        torch.testing.assert_close(joined, numbers_of(module))


def test_blocks_of_gguf_are_divided_in_their_form(tmp_path: Path) -> None:
    """Q5_0 has two planes, and values have another form than queries and keys."""
    pytest.importorskip("gguf")
    model = tiny_models.build("llama", hidden_size=512, intermediate_size=512)
    kinds = {"*": "Q5_0", "blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_1"}
    path = gguf_files.write(model, tmp_path / "model.gguf", kinds=kinds)
    assert_divided(kept(path, Mesh()), on_ranks(2, lambda axis: kept(path, Mesh(tp=axis))))


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("tp", [2, 4])  # with two key heads, which four ranks have twice
def test_ranks_have_the_cache_scales_of_their_own_heads(tp: int, by_head: bool, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path)
    with_scales(tmp_path, scales_of(2, by_head), "{}_scale", by_head, {"quant_method": "fp8"})
    model = with_cache(tmp_path, read_model_config(tmp_path), kv_format("fp8"))

    def scales(mesh: Mesh) -> Tensor:
        decoder = Decoder(model.spec, OPS, dtype=torch.float32, device=CPU, max_positions=64, mesh=mesh)
        load_weights(decoder, tmp_path, model.weights)
        return torch.stack([layer.mixer.kv_scales.detach() for layer in decoder.layers])

    whole = scales(Mesh())
    assert by_head == (whole[:, 0] != whole[:, 1]).all().item()
    for rank, own in enumerate(on_ranks(tp, lambda axis: scales(Mesh(tp=axis)))):
        head = rank * 2 // tp
        assert torch.equal(own, whole[:, head : head + 1])


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
def test_groups_and_blocks_are_not_divided(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("llama", SCHEMES[name], tmp_path / "model")
    with pytest.raises(
        ModelLoadError,
        match=r"tensor_parallel_size 2 divides (blocks|groups) of 128 (outputs|inputs) of layers\.0\.mixer",
    ):
        on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))


@pytest.mark.parametrize("name", ["gptq", "fp8 dynamic"])
def test_quantized_experts_are_divided_in_their_form(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("qwen3_moe", SCHEMES[name], tmp_path / "model", hidden_size=512, head_dim=64)
    whole = kept(folder, Mesh())
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis, whole_experts=True)))
    stacks = [(path, module) for path, module in whole.named_modules() if isinstance(module, ExpertStack)]
    assert stacks
    for path, module in stacks:
        own = [part.get_submodule(path) for part in parts]
        torch.testing.assert_close(torch.cat([numbers_of(each) for each in own]), numbers_of(module))
