"""The engine with quantized KV caches: what they predict and hold, what must not depend on how a request was run, and
what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.core.specs.state import KVSpec
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.kv_format import KVFormat, kv_format
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.heads import Heads
from ridgeline.perf.footprint import kv_bytes_per_token
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline, step_ops
from ridgeline.worker.state.states import DeviceRows, States
from tests.driving import Rig, ask, rig

QUANTIZED = ("fp8_e4m3", "fp8_e5m2", "int8")
PROMPTS = [tuple(3 + (7 * i + n) % 90 for i in range(n)) for n in (37, 9, 37, 50)]


def prompt_logprobs(own: Rig, prompts: list[tuple[int, ...]] = PROMPTS) -> list[float]:
    requests = [ask(f"r{i}", p, max_tokens=6, prompt_logprobs=1) for i, p in enumerate(prompts)]
    own.run(*requests)
    assert not own.errors
    return [
        float(entry.logprob)
        for request, p in zip(requests, prompts, strict=True)
        for _, entry in zip(p[1:], own.outcomes[request.id].prompt, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_predictions_are_near_those_of_plain_caches(tiny_model: Callable[[str], Path], family: str) -> None:
    found: dict[str, torch.Tensor] = {}
    for name in ("auto", *QUANTIZED):
        with rig(tiny_model(family), kv_cache_dtype=name, kv_cache_memory=1 << 22) as own:
            found[name] = torch.tensor(prompt_logprobs(own))
    spread = found["auto"].std()  # these models' logprobs are far apart
    off = {name: ((found[name] - found["auto"]).abs().mean() / spread).item() for name in QUANTIZED}
    assert 0 < off["int8"] < off["fp8_e4m3"] < off["fp8_e5m2"]
    assert off["int8"] < 0.1
    assert off["fp8_e5m2"] < 0.5


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])  # windows; windows and sinks
def test_predictions_do_not_depend_on_chunks_or_hits(tiny_model: Callable[[str], Path], family: str, name: str) -> None:
    """Every reader of a token, its own step included, sees the numbers that its levels stand for. Blocks that are
    shared or copied bring their scales."""
    seen = []
    for tokens, caching in ((8, False), (64, True)):
        settings: dict[str, Any] = {"max_num_batched_tokens": tokens, "enable_prefix_caching": caching}
        with rig(tiny_model(family), kv_cache_dtype=name, kv_cache_memory=1 << 22, **settings) as own:
            first = prompt_logprobs(own)
            if caching:  # now all but the last token of each comes from the cache, and one goes on otherwise
                other = (*PROMPTS[0][:30], 5, 6, 7)
                own.run(
                    ask("again", PROMPTS[3], max_tokens=9, logprobs=1), ask("other", other, max_tokens=9, logprobs=1)
                )
                assert own.engine.scheduler.cache.hit_tokens > 60
                again = own.outcomes["again"].scored, own.outcomes["other"].scored
            else:
                own.run(ask("again", PROMPTS[3], max_tokens=9, logprobs=1))
                own.run(ask("other", (*PROMPTS[0][:30], 5, 6, 7), max_tokens=9, logprobs=1))
                again = own.outcomes["again"].scored, own.outcomes["other"].scored
        seen.append((torch.tensor(first), again))
    (chunked, alone), (whole, hit) = seen
    assert (chunked - whole).abs().median() < 1e-4
    assert (chunked - whole).abs().max() < 0.02  # a level may be the next one
    for ours, theirs in zip(alone, hit, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)) < 0.02


def test_memory_holds_twice_the_tokens(tiny_model: Callable[[str], Path]) -> None:
    tokens = {}
    for name in ("auto", "bfloat16", "int8"):
        with rig(tiny_model("llama"), kv_cache_dtype=name, kv_cache_memory=1 << 21) as own:
            layout = own.engine.layout
            (spec,) = (group.spec for group in layout.groups)
            assert isinstance(spec, KVSpec)
            tokens[name], width = layout.num_pages * layout.block_size, spec.head_dim
            assert layout.page_bytes * layout.num_pages <= 1 << 21
            assert layout.kv_dtypes == ({"auto": "float32"}.get(name, name),)
    assert tokens["bfloat16"] == pytest.approx(2 * tokens["auto"], rel=0.01)
    assert tokens["int8"] == pytest.approx(4 * width / (width + 2) * tokens["auto"], rel=0.01)


def model(form: KVFormat = KVFormat(), head_dim: int = 128) -> ModelSpec:
    mixer = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=head_dim, scale=0.1, kv_format=form)
    layer = LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=64), norm=NormSpec())
    return ModelSpec(
        architecture="", vocab_size=8, hidden_size=64, layers=(layer,) * 3, final_norm=NormSpec(),
        max_position_embeddings=4096,
    )  # fmt: skip


def test_planner_and_roofline_count_the_bytes() -> None:
    plain, ours = model(), model().with_kv_format(kv_format("fp8"))
    assert kv_bytes_per_token(plain, "bfloat16") == 3 * 2 * 2 * 256
    assert (
        kv_bytes_per_token(plain, "fp8")
        == 3 * 2 * 2 * 130
        == sum(layer.mixer.state.token_bytes("bfloat16") for layer in ours.layers)
    )
    hardware = find("H200").attained()
    shape = StepShape([1] * 4, [8192] * 4, 4)
    for ops in (step_ops(ours, shape, dtype="bfloat16"), step_ops(plain, shape, dtype="bfloat16", kv_dtype="fp8_e4m3")):
        cost = {op.name: op.cost.bytes for op in ops}
        before = {op.name: op.cost.bytes for op in step_ops(plain, shape, dtype="bfloat16")}
        assert before["attention"] - cost["attention"] == 4 * 8192 * 2 * 2 * (256 - 130)
        assert before["write_kv"] - cost["write_kv"] == 4 * 2 * 2 * (256 - 130)
    faster = Roofline(ours, hardware, "bfloat16").step_limit(shape)
    assert faster == pytest.approx(Roofline(plain, hardware, "bfloat16", "fp8").step_limit(shape))
    assert faster < Roofline(plain, hardware, "bfloat16").step_limit(shape)


def test_blocks_of_unlike_formats_have_unlike_hashes() -> None:
    """The same tokens in a cache of another format are another prefix, to other tiers and routers too."""
    seq = cast("Any", SimpleNamespace(request=SimpleNamespace(cache_salt="tenant", prefix_keys=())))
    roots = set()
    for form in (*map(kv_format, ("auto", "bfloat16", *QUANTIZED)), KVFormat("fp8_e4m3", "model")):
        groups = model().with_kv_format(form).cache_groups
        layout = CacheLayout(groups=groups, block_size=16, dtype="float16", num_pages=4)
        roots.add(CacheManager(layout, prefix_caching=True, max_chunk=16).names.root(seq))
    assert len(roots) == 6


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidConfig, match="unknown kv_cache_dtype 'fp4'; use auto, bfloat16, fp8"):
        LLMConfig(kv_cache_dtype="fp4")
    with pytest.raises(InvalidConfig, match="heads of even width, and this model's have 33"):
        model(head_dim=33).with_kv_format(kv_format("int8"))
    with pytest.raises(InvalidConfig, match="scales"):
        KVFormat("int8")
    assert model(head_dim=33).with_kv_format(kv_format("bfloat16")).layers[0].attention.kv_format.dtype == "bfloat16"


def test_scales_of_a_checkpoint_are_kept_if_it_is_their_dtype_that_is_wanted() -> None:
    given = KVFormat("fp8_e4m3", "model")
    for name, scales in (("auto", "model"), ("fp8", "model"), ("int8", "row")):
        assert model(given).with_kv_format(kv_format(name)).layers[0].attention.kv_format.scales == scales
    assert given.head_bytes(128, "bfloat16") == 128


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("implementation", ["triton", None])
def test_layers_attend_with_the_scales_of_a_checkpoint_and_count_what_saturates(
    implementation: str | None, device: str
) -> None:
    """Two steps, of a prompt and of one token more, beside attention to plain numbers."""
    on, ops_named = torch.device(device), ("attention_schedule", "paged_attention", "decode_attention", "rope_kv")
    results = []
    for form in (KVFormat("fp8_e4m3", "model"), KVFormat()):
        spec = replace(model(form, head_dim=32), layers=model(form, head_dim=32).layers[:1])
        ops = Ops(Platform.of(on), dict.fromkeys(ops_named, implementation) if implementation else {})
        layout = CacheLayout(groups=spec.cache_groups, block_size=16, dtype="float32", num_pages=5)
        states, generator = States(layout, spec, torch.float32, on, ops), torch.Generator().manual_seed(0)
        table_SC = torch.tensor([[3, 1, 2]], dtype=torch.int32, device=on)
        saturated_1 = torch.zeros(1, dtype=torch.int64, device=on)
        scales_G2 = torch.tensor([[0.02, 0.01], [0.03, 0.002]], device=on)
        outputs = []
        for new, length in ((20, 20), (1, 21)):
            position_T = torch.arange(length - new, length, device=on)
            place_T = table_SC[0, position_T // 16].long() * 16 + position_T % 16
            rows = DeviceRows(
                slots_R=torch.zeros(1, dtype=torch.int32, device=on),
                start_R1=torch.tensor([0, new], dtype=torch.int32, device=on),
                kv_len_R=torch.tensor([length], dtype=torch.int32, device=on),
                last_R=torch.tensor([new - 1], device=on),
                num_tokens=new,
                tokens_each=new,
            )
            states.begin(rows, [table_SC], [place_T])
            qkv_TX = torch.randn(new, 12 * 32, generator=generator).to(on)
            given = (scales_G2, saturated_1) if form.quantized else (None, None)
            mixer = spec.layers[0].attention
            softmax = Softmax(mixer.scale, window=mixer.window)
            heads = Heads(mixer, ops, None, None, 0.0, None, softmax, *given)
            outputs.append((qkv_TX, states[0].attend(qkv_TX, position_T, heads)))
        results.append((outputs, saturated_1.item()))
    (ours, saturated), (plain, _) = results
    beyond = sum(
        int((qkv_TX[:, -64:-32].abs() > 448 * 0.01).sum() + (qkv_TX[:, -32:].abs() > 448 * 0.002).sum())
        for qkv_TX, _ in ours
    )
    assert saturated == beyond > 50
    for (_, found), (_, expected) in zip(ours, plain, strict=True):
        first = slice(0, 4 * 32)  # heads whose values all fit
        assert 0 < (found - expected)[:, first].abs().max() < 0.2
