"""Recurrent layers that ranks divide: heads or channels, and with them the states that a request keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("msgspec")

from ridgeline.assembly import assemble
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import LayerSpec, MLPSpec, ModelSpec, Source
from ridgeline.core.specs.state import RecurrentSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.layers.linear import Linear
from ridgeline.models import model_config
from ridgeline.parallel.mesh import Mesh
from ridgeline.weights.loader import load_weights, read_model_config
from tests import tiny_models
from tests.driving import Outcome
from tests.models.test_linear import CONFIGS, KIMI, NORM, filled
from tests.parallel.divided import CPU, OPS, TOKENS, kept, numbers_of
from tests.parallel.test_covering_design import asked
from tests.parallel.threads import on_ranks
from tests.ranks.stages import meshed
from tests.ranks.test_pipeline import assert_same
from tests.weights.quantized_files import SCHEMES, quantize

# By four ranks: fewer key heads, groups and norms than ranks; one norm for all heads; channels; shared blocks
BY_FOUR = ("qwen3_next", "nemotron_h", "bamba", "mamba", "rwkv", "zamba2", "kimi_linear")
BY_TWO = ("falcon_h1", "lfm2", "jamba", "mamba2")  # whose kinds are not among those
OTHERS = [
    (family, ranks)
    for family in tiny_models.RECURRENT
    for ranks, own in ((2, BY_TWO), (4, BY_FOUR))
    if family not in own
]
LINEAR: dict[str, ModelSpec] = {
    name: model_config({**CONFIGS[name], "num_attention_heads": 4}).spec for name in CONFIGS
}
LINEAR["kimi"] = replace(
    LINEAR["gla"],
    layers=(LayerSpec(mixer=replace(KIMI, heads=4), feed_forward=MLPSpec(intermediate_size=40), norm=NORM),) * 2,
)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 2) for family in BY_TWO),
        *((family, 4) for family in BY_FOUR),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in OTHERS),
    ],
)
def test_ranks_that_divide_states_answer_as_one_device(
    family: str, ranks: int, tiny_model: Callable[[str], Path], one_device: Callable[[str], dict[str, Outcome]]
) -> None:
    """Chunks beside tokens, and prefixes that are found again."""
    with meshed(tiny_model(family), tensor_parallel_size=ranks) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, one_device(family))


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h_moe"])
def test_states_are_divided_and_their_tokens_too(
    family: str, tiny_model: Callable[[str], Path], one_device: Callable[[str], dict[str, Outcome]]
) -> None:
    sizes: dict[str, Any] = {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 6}
    with meshed(tiny_model(family), tensor_parallel_size=2, **sizes) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, one_device(family))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_next", "jamba", "nemotron_h_moe", "kimi_linear"])
def test_ranks_divide_states_and_deal_out_experts(
    family: str, tiny_model: Callable[[str], Path], one_device: Callable[[str], dict[str, Outcome]]
) -> None:
    with meshed(tiny_model(family), tensor_parallel_size=2, enable_expert_parallel=True) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, one_device(family))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "rwkv"])
def test_drafts_for_divided_states_change_no_token(
    family: str, tiny_model: Callable[[str], Path], one_device: Callable[[str], dict[str, Outcome]]
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options: dict[str, Any] = {"speculative_config": drafts, "kv_cache_memory": 1 << 20}
    with meshed(tiny_model(family), tensor_parallel_size=2, **options) as own:
        got = own.run(*asked())
        assert own.errors == []
    assert_same(got, one_device(family))


@pytest.mark.parametrize("name", LINEAR)
@torch.inference_mode()
def test_linear_attention_is_divided_by_its_heads(name: str, tmp_path: Path) -> None:
    """Retention, each of whose heads forgets at a rate of its own, and mixers that no checkpoint has yet."""
    spec = LINEAR[name]
    whole = filled(Decoder(spec, OPS, dtype=torch.float32, device=CPU))
    names = {parameter: f"model.{parameter}" for parameter, _ in whole.named_parameters()}
    save_file(
        {names[each]: tensor.contiguous() for each, tensor in whole.named_parameters()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gla"]))

    def scored(mesh: Mesh) -> Tensor:
        decoder = Decoder(spec, OPS, dtype=torch.float32, device=CPU, mesh=mesh)
        load_weights(decoder, tmp_path, {each: (Source(name=own),) for each, own in names.items()})
        decoder.prepare()
        states = dense_states(decoder.spec, 1, len(TOKENS), torch.float32, CPU)
        return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), states))

    want = scored(Mesh())
    for ranks in (2, 4):
        for got in on_ranks(ranks, lambda axis: scored(Mesh(tp=axis))):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("family", tiny_models.RECURRENT)
def test_a_rank_keeps_its_part_of_a_state(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Half the numbers, but for what several ranks need: a token as it came, and groups that all heads share."""
    whole = read_model_config(tiny_model(family)).spec
    part = part_of(whole, 2)
    for layer, own in zip(whole.layers, part.layers, strict=True):
        states = zip(layer.mixer.states, own.mixer.states, strict=True)
        for all_of_it, half in states:
            if isinstance(all_of_it, RecurrentSpec) and isinstance(half, RecurrentSpec):
                kept = half.parts[-1], all_of_it.parts[-1]
                if layer.mixer.kind != "channel_mix":
                    assert 2 * kept[0].num_bytes("float32") == kept[1].num_bytes("float32"), layer.mixer.kind
                else:
                    assert kept[0] == kept[1]


def test_norms_of_mamba_2_span_ranks_where_there_are_fewer(tiny_model: Callable[[str], Path]) -> None:
    """What the tests above rely on: every case is among them."""

    def spans(family: str, ranks: int) -> tuple[int, int]:
        mixer = part_of(read_model_config(tiny_model(family)).spec, ranks).layers[0].mixer
        assert isinstance(mixer, Mamba2Spec)
        return mixer.groups, mixer.norm_ranks

    assert spans("nemotron_h", 2) == (1, 1)
    assert spans("nemotron_h", 4) == (1, 2)
    assert spans("bamba", 4) == (1, 4)


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_quantized_projections_of_delta_rules_are_divided_in_their_form(family: str, name: str, tmp_path: Path) -> None:
    """Every rank holds the rows of its heads, of each of q, k, v, z, b and a."""
    small = ["in_proj_ba", "in_proj_a", "in_proj_b"] if name == "fp8 blocks" else []
    config = {**SCHEMES[name].config, **({"modules_to_not_convert": ["lm_head", *small]} if small else {})}
    scheme = replace(SCHEMES[name], config=config, plain=(*SCHEMES[name].plain, *small))
    sizes = {
        "linear_num_key_heads": 4,
        "linear_value_head_dim": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    columns = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 512)
    folder, _ = quantize(family, scheme, tmp_path / "model", **sizes, **columns)
    whole = kept(folder, Mesh())
    parts = on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))
    found = 0
    for path, module in whole.named_modules():
        if not path.endswith("mixer.delta_in"):
            continue
        assert isinstance(module, Linear)
        assert module.fillings
        pieces = [numbers_of(each.get_submodule(path)).split(each.get_submodule(path).columns) for each in parts]
        joined = torch.cat([torch.cat(each) for each in zip(*pieces, strict=True)])
        torch.testing.assert_close(joined, numbers_of(module))
        found += 1
    assert found >= 2


def test_blocks_that_heads_would_divide_are_refused(tmp_path: Path) -> None:
    folder, _ = quantize("qwen3_5", SCHEMES["fp8 blocks"], tmp_path / "model")
    with pytest.raises(ModelLoadError, match=r"tensor_parallel_size 2 divides blocks of 128 outputs of .*delta_in"):
        on_ranks(2, lambda axis: kept(folder, Mesh(tp=axis)))


@pytest.mark.parametrize(
    ("family", "ranks", "what"),
    [
        ("qwen3_next", 8, "4 value heads of delta rules"),
        ("mamba2", 3, "8 heads of Mamba-2"),
        ("mamba", 3, "128 channels of Mamba"),
        ("rwkv", 5, "96 channels of RWKV"),
        ("lfm2", 3, "64 channels of convolutions"),
        ("kimi_linear", 8, "4 heads of delta attention"),
    ],
)
def test_states_that_do_not_divide_are_refused_in_a_sentence(
    family: str, ranks: int, what: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(
        InvalidConfig, match=rf"^tensor_parallel_size {ranks} does not divide the model's {what}; .*\.$"
    ):
        assemble(LLMConfig(model=tiny_model(family), device="cpu", dtype="float32", tensor_parallel_size=ranks))
