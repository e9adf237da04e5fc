"""Experiments with forms of weights and with mixtures of experts."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.ops import Ops
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.scripts import formats_page, mixture_use, padded_experts, random_gguf, weight_forms
from ridgeline_bench.scripts.driven import Driven
from tests.bench.scripts.conftest import CONFIG

CPU = torch.device("cpu")
MIXTURE = {
    **CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


# ---- forms --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are blocks of 256 weights."""
    found = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "torch_dtype": "bfloat16"}
    (found / "config.json").write_text(json.dumps(CONFIG | sizes))
    return found


def figures(model: Path, name: str) -> formats_page.Line:
    a = Namespace(model=str(model), batches=[1, 2], input=8, tokens=4)
    return formats_page.attempted(a, name)[0]


def test_forms_take_the_memory_of_their_bits(wide: Path) -> None:
    lines = {name: figures(wide, name) for name in ("bf16", "gptq", "q4_k_m")}
    spec = CONFIG | {"hidden_size": 256, "intermediate_size": 512}
    # q and o [256, 256], k and v [128, 256], gate, up and down [512, 256]
    layers = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    rest = 2 * spec["vocab_size"] * 256
    for name, line in lines.items():
        bits = {"bf16": 16 if line["dtype"] == "bfloat16" else 32, "gptq": 4 + 16 / 128, "q4_k_m": 5.0}[name]
        plain = 16 if line["dtype"] == "bfloat16" else 32
        least = (layers * bits + (0 if name == "q4_k_m" else rest) * plain) / 8e9
        assert line["weights_gb"] >= 0.9 * least
        assert set(line["tokens_per_second"]) == {1, 2}
        assert line["ttft_ms"] > 0
    assert lines["gptq"]["weights_gb"] < 0.75 * lines["bf16"]["weights_gb"]
    assert lines["q4_k_m"]["weights_gb"] < 0.75 * lines["bf16"]["weights_gb"]


def test_a_form_that_nothing_holds_is_named_with_the_reason(wide: Path) -> None:
    line = figures(wide, "mxfp8")
    assert "sm_100" in line["left_out"]
    table, left_out = formats_page.page([{**line, "form": "mxfp8", "model": "m", "gpu": ""}], {})
    assert (table.row_count, left_out) == (0, [line["left_out"]])


def test_the_page_shows_the_perplexity_that_was_stored_for_the_scheme_and_divides_by_all_devices() -> None:
    stored = [
        {"workload": "quantization:plain:", "metric": "perplexity", "model": "embedded", "value": value,
         "options": {"group": group}}
        for value, group in ((7.0, 128), (6.5, 128), (9.0, 64))
    ]  # fmt: skip
    quality = formats_page.perplexities(stored)
    assert quality == {"plain:": 6.5}
    line = {
        "form": "bf16@2", "model": "m", "gpu": "G", "weights_gb": 4.0, "kv_gb": 1.0, "devices": 2, "ttft_ms": 3.0,
        "tokens_per_second": {1: 10.0, 8: 80.0}, "limit_tokens_per_second": {1: 20.0, 8: 100.0},
    }  # fmt: skip
    table, _ = formats_page.page([line], quality)
    assert [next(iter(column.cells)) for column in table.columns] == [
        "bf16@2", "8.00", "2.0", "3.0", "10", "80", "80 %", "10", "6.500",
    ]  # fmt: skip


def test_every_perplexity_of_the_page_is_among_the_stored_results() -> None:
    known = formats_page.stored_quality()
    assert {form.quality for form in weight_forms.FORMS.values() if not form.lacking} <= set(known)


@pytest.mark.parametrize("name", ["bf17", "bf16@0", "bf16@two"])
def test_unknown_forms_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="unknown form"):
        weight_forms.split(name)


def test_q4_k_m_has_the_types_of_llama_cpp_and_numbers_of_the_usual_size(wide: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(random_gguf.write(wide, tmp_path / "model.gguf", "Q4_K_M"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["output.weight"] == "Q6_K"
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == types["blk.1.ffn_up.weight"] == "Q4_K"
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("Q4_K", "Q6_K"):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert abs(values.mean()) < 0.003
            assert 0.01 < values.std() < 0.05
    assert reader.fields["llama.rope.freq_base"].contents() == 10000.0
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2
    assert reader.fields["general.architecture"].contents() == "llama"
    # of 32 layers: the first and the last four, and every third one of those between
    more = [n for n in range(32) if random_gguf.type_of(f"blk.{n}.ffn_down", "Q4_K_M", 32) == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert random_gguf.type_of("blk.0.attn_k", "Q4_K_M", 32) == "Q4_K"
    assert random_gguf.type_of("output", "BF16", 32) == "BF16"


@pytest.mark.parametrize("kind", ["BF16", "F32", "Q8_0"])
def test_a_file_of_plain_or_encoded_numbers_is_read_by_the_gguf_package(wide: Path, tmp_path: Path, kind: str) -> None:
    reader = gguf.GGUFReader(random_gguf.write(wide, tmp_path / "model.gguf", kind))
    for tensor in reader.tensors:
        one = tensor.name.endswith("norm.weight")
        assert tensor.tensor_type.name == ("F32" if one else kind)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (values == 1).all() if one else values.std() == pytest.approx(0.02, rel=0.05)
    assert len(reader.tensors) == 3 + 2 * 9


# ---- padded experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_padded_products_are_those_of_the_engine_s_ops_unless_tokens_are_dropped(tokens: int, skew: float) -> None:
    case = ExpertsCase(tokens, 32, 48, 8, 2, skew=skew)
    layer, routes = padded_experts.Layer.random(case, torch.float32, CPU), case.routes(CPU, 3)
    x_TM = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))
    ways = padded_experts.ways(Ops(Platform.of(CPU)), x_TM, layer, routes)
    plain = Ops(Platform.of(CPU), {"grouped_gate_up": "reference", "grouped_down": "reference"})
    wanted = padded_experts.grouped(plain, x_TM, layer, routes)
    got = np.bincount(routes.expert_TK.flatten().numpy(), minlength=8)
    assert padded_experts.counts(routes) == got.tolist()
    assert ways["padded, all"].rows == 8 * got.max()
    most = -(-10 * tokens * 2 // 64)  # ceil(1.25 · tokens · 2 / 8)
    assert ways["padded, 1.25"].rows == 8 * most
    assert ways["padded, 1.25"].lost == pytest.approx(np.maximum(got - most, 0).sum() / (2 * tokens))
    for way in ways.values():
        if way.exact:
            torch.testing.assert_close(way.run(), wanted, rtol=1e-4, atol=1e-5)


def test_a_token_beyond_the_capacity_loses_that_expert_alone() -> None:
    case = ExpertsCase(6, 16, 16, 4, 2, skew=5.0)  # all tokens choose experts 0 and 1
    layer, routes = padded_experts.Layer.random(case, torch.float32, CPU), case.routes(CPU)
    x_TM = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    ops = Ops(Platform.of(CPU))
    found = padded_experts.padded(ops, x_TM, layer, routes, padded_experts.places(routes, 4))
    whole = padded_experts.padded(ops, x_TM, layer, routes, padded_experts.places(routes, 6))
    torch.testing.assert_close(found[:4], whole[:4])
    assert torch.equal(found[4:], torch.zeros_like(found[4:]))


def test_a_way_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ExpertsCase(5, 16, 16, 4, 2)
    layer = padded_experts.Layer.random(case, torch.float32, CPU)
    effort = Effort(seconds=0.001, repeats=1)
    lines = padded_experts.bench(case, layer, CPU, effort)
    assert {line["way"] for line in lines} == {"grouped", "padded, all", "padded, 1.25", "one by one"}
    for line in lines:
        kept = 10 * (1 - line["dropped"])
        assert line["useful"] == pytest.approx(kept / line["rows"])
        assert line["tflops"] == pytest.approx(6 * kept * 16 * 16 / (1e-3 * line["ms"]) / 1e12)
    monkeypatch.setattr(padded_experts, "one_by_one", lambda ops, x_TM, *rest: x_TM)
    with pytest.raises(SystemExit, match="one by one is wrong"):
        padded_experts.bench(case, layer, CPU, effort)


# ---- a mixture served ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    found = Driven(str(folder), load_format="dummy", device="cpu", max_model_len=128, max_num_seqs=16)
    mixture_use.widen(found, 0.5)
    yield found
    found.close()


def test_experts_in_use_grow_with_the_batch_as_uniform_routing_says(mixture: Driven) -> None:
    mixture.llm.assembly.worker.forget_expert_load()
    one, many = mixture_use.bench(mixture, [1, 16], length=8, tokens=12, devices=1)
    assert one["experts_with_tokens"] == one["uniform"] == 2
    assert many["uniform"] == pytest.approx(8 * (1 - 0.75**16))
    assert 3 <= many["experts_with_tokens"] <= 8
    load_LE = mixture.llm.expert_load()
    assert load_LE.shape == (2, 8)
    # Each run of B requests counts 8 + T - 1 tokens a request and two experts a token: T is 3, then 12 four times.
    # Prompts of one run that begin alike share their first tokens
    ran = sum(batch * ((8 + 3 - 1) + 4 * (8 + 12 - 1)) for batch in (1, 16))
    assert 0.97 * 2 * ran <= load_LE[0].sum() == load_LE[1].sum() <= 2 * ran
    routes = mixture_use.routes_line(load_LE)
    assert routes["imbalance_of_layers"][0] == pytest.approx(8 * max(routes["shares_of_first_layer"]), abs=1e-3)
    assert sum(routes["shares_of_first_layer"]) == pytest.approx(1, abs=1e-3)
    assert all(0 < entropy <= 1 for entropy in routes["entropy_of_layers"])


def test_memory_names_the_share_of_the_experts(mixture: Driven) -> None:
    memory = mixture_use.memory_line(mixture, 1)
    experts = 2 * 8 * 3 * 64 * 128  # layers, experts, matrices
    others = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 8 * 64 + 2 * 64) + 64 + 2 * 320 * 64
    assert memory["expert_share_of_parameters"] == pytest.approx(experts / (experts + others))
    assert memory["weights_gb"] == pytest.approx(4 * (experts + others) / 1e9, rel=0.2)


def test_only_steps_of_the_batch_count() -> None:
    def look(tokens: int, *counts: list[int]) -> ExpertLoad:
        step_LE = np.array(counts)
        return ExpertLoad((0, 1), (4, 4), step_LE, step_LE, tokens)

    others = look(9, [1, 1, 1, 1], [1, 1, 1, 1])
    looks = [look(2, [1, 1, 0, 0], [2, 0, 0, 0]), others, look(2, [1, 1, 1, 1], [0, 0, 1, 1])]
    assert mixture_use.used(looks, 2) == (1.5 + 3) / 2
    assert mixture_use.used(looks, 5) == 0


def test_a_model_without_experts_is_refused(driven: Driven) -> None:
    with pytest.raises(InvalidConfig, match="no experts"):
        mixture_use.spec_of(driven)
