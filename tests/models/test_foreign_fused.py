"""Modules of transformers' classes whose work ops of ours do: they are taken for what they compute. Steps in buckets of
fixed sizes, as graphs have, write the same tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import foreign
from ridgeline.assembly.foreign import capture, check_agrees
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.fused import gated_parts_of, rms_norm_of
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.dense import DenseCausal
from ridgeline.worker import graphs
from ridgeline.worker.graphs import Graphs
from tests.foreign_models import RUNNING, VOCAB, cut, decoder_of
from tests.test_speculation import Replayed

OPS = Ops(Platform(device_type="cpu"))


class Capped(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).clamp(-2, 2)


class Summing(LlamaRMSNorm):
    """Looks at other tokens, which a row alone does not show."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1e-3 * hidden_states.sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "offset"),
    [(LlamaRMSNorm, 0), (GemmaRMSNorm, 1), (CohereLayerNorm, None), (Capped, None), (Summing, None)],
)
def test_an_rms_norm_is_known_by_what_it_computes(norm: Any, offset: int | None) -> None:
    module = norm(24)
    module.weight.data.normal_()
    found = rms_norm_of(module, OPS)
    assert (None if found is None else found.offset) == offset
    if found is not None:
        x = 5 * torch.randn(3, 24)
        assert torch.allclose(found.of(OPS, x), module(x), atol=1e-5)


class FeedForward(nn.Module):
    """A feed-forward whose products have names that say nothing."""

    def __init__(self, act: Any, way: str = "gated") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 20)
        self.act, self.way = act, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "added":
            return self.b(self.act(self.c(x)) + self.a(x))
        if self.way == "scaled":
            return 1.01 * self.b(self.act(self.c(x)) * self.a(x))
        return self.b(self.act(self.c(x)) * self.a(x))


@pytest.mark.parametrize(
    ("act", "way", "kind"),
    [
        (nn.SiLU(), "gated", "silu"),
        (nn.GELU(), "gated", "gelu"),
        (nn.GELU("tanh"), "gated", "gelu_tanh"),
        (nn.Sigmoid(), "gated", None),
        (nn.SiLU(), "added", None),
        (nn.SiLU(), "scaled", None),
    ],
)
def test_a_gated_feed_forward_is_known_by_what_it_computes(act: Any, way: str, kind: str | None) -> None:
    module = FeedForward(act, way)
    found = gated_parts_of(module, OPS)
    assert (None if found is None else found.kind) == kind
    if found is not None:
        assert (found.gate, found.up, found.down) == (module.c, module.a, module.b)


def built(kind: str, folder: Path) -> ForeignDecoder:
    cut(kind, **RUNNING[kind]).built().save_pretrained(folder)
    decoder = decoder_of(folder)
    decoder.prepare()
    return decoder


@pytest.mark.parametrize(
    ("kind", "rotates", "normalises"),
    [
        ("qwen3", 4, 4),
        ("smollm3", 3, 0),  # a layer in four has no positions
        ("gemma3_text", 4, 4),  # two tables of angles, and norms with an offset
        ("hunyuan_v1_dense", 0, 0),  # normalises what it has rotated
        ("glm", 0, 0),  # rotates neighbours
        ("ernie4_5", 0, 0),  # in float32 by a function of its own
    ],
)
def test_rotations_are_left_to_our_attention_where_it_makes_the_same_heads(
    kind: str, rotates: int, normalises: int, tmp_path: Path
) -> None:
    decoder = built(kind, tmp_path)
    heads = [layer.heads for layer in decoder.attends]
    assert sum(each.cos_sin_ZY is not None for each in heads) == rotates
    assert sum(each.q_norm_D is not None for each in heads) == normalises


def test_products_of_one_input_are_one_and_stay_the_models_weights(tmp_path: Path) -> None:
    decoder = built("qwen3", tmp_path)
    layer = decoder.model.model.layers[0]
    query, key = layer.self_attn.q_proj, layer.self_attn.k_proj
    assert query.weight.untyped_storage().data_ptr() == key.weight.untyped_storage().data_ptr()
    x = torch.randn(1, 3, 80)
    with torch.inference_mode():
        expected = [nn.functional.linear(x, each.weight) for each in (query, key)]
        for order in ((0, 1), (1, 0)):
            for index in order:
                assert torch.allclose((query, key)[index](x), expected[index], atol=1e-5)
        other = torch.randn(1, 3, 80)
        assert torch.allclose(query(other), nn.functional.linear(other, query.weight), atol=1e-5)


def test_what_an_op_makes_otherwise_is_taken_out_by_the_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder, ids = built("llama", tmp_path), torch.arange(3, 27)
    table_ZY = decoder.attends[2].heads.cos_sin_ZY
    assert table_ZY is not None
    table_ZY.mul_(0.5)
    with caplog.at_level(logging.INFO):
        check_agrees(decoder)
    assert "runs its own modules alone" in caplog.text
    assert not len(decoder.swaps)
    with torch.inference_mode():
        found = decoder.logits(decoder(ids, torch.arange(24), DenseCausal(1)))
    assert torch.allclose(found, decoder.plain_logits(ids), atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_steps_in_buckets_write_the_same_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(kind, **RUNNING[kind]).built().save_pretrained(tmp_path)
    prompts = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 17)]
    found, params = [], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    monkeypatch.setattr(graphs, "Graph", Replayed)
    for buckets in (False, True):
        with LLM(
            tmp_path, model_impl="transformers", dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=32,
            max_num_seqs=4, device="cpu",
        ) as llm:  # fmt: skip
            runner = llm.assembly.local.runner
            if buckets:
                runner.launch.graphs = Graphs(runner.segments, 4, 32)
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            found.append([list(each.outputs[0].token_ids) for each in llm.generate(asked, params, use_tqdm=False)])
    assert sum(graph.replays for graph in runner.launch.graphs._graphs.values()) > 12
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["trial", "buckets"])
def test_a_model_that_no_graph_holds_runs_op_by_op_and_says_so(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder, captured = built("llama", tmp_path), []

    def waits(*_: object) -> str:
        captured.append(where)
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(foreign, "_uncapturable", waits if where == "trial" else lambda _: "")
    capture(decoder, waits)
    assert captured == [where]
    [line] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith("LlamaForCausalLM runs op by op")
    assert "called a synchronizing CUDA operation" in line
    monkeypatch.setattr(foreign, "_uncapturable", lambda _: "")

    def full() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        capture(decoder, full)
