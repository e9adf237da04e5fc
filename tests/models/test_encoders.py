"""Encoders of BERT's kind, beyond what tests/test_pooling.py asks of every model that pools: roundings in bfloat16,
what layers share, and sizes.

A model in bfloat16 must not be further from the exact results of its weights than transformers is. 1.2 allows for the
spread of such errors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline import LLM
from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import Disentangled, Relative
from ridgeline.kernels.attention.packed import disentangled
from ridgeline.layers.attention import buckets, log_buckets
from ridgeline.models import model_config
from ridgeline.perf.footprint import parameters
from ridgeline.weights.loader import checkpoint_views, empty_decoder
from tests import pooled_models
from tests.devices import DEVICES, placed
from tests.models import pooled_configs

NEW = ("distilbert", "electra", "albert", "mpnet", "nomic_bert", "jina_v3", "embedding_gemma", "deberta")
PROMPTS = ([5], list(range(4, 60)), [9] * 40 + [3], [7, 8], [*range(60, 20, -1), *range(4, 64)])
CONFIGS = (
    pooled_configs.ELECTRA_SMALL,
    pooled_configs.ALBERT_BASE,
    pooled_configs.classifier(pooled_configs.ALBERT_BASE),
    pooled_configs.MPNET_BASE,
    pooled_configs.NOMIC_BERT,
    pooled_configs.EMBEDDING_GEMMA,
    pooled_configs.DEBERTA_V3,
    pooled_configs.GTE,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: pooled_models.save(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", NEW)
@torch.inference_mode()
def test_vectors_of_tokens_are_no_worse_than_transformers_in_bfloat16(
    family: str, device: str, folder: Callable[[str], Path]
) -> None:
    exact = pooled_models.build(family)
    for parameter in exact.parameters():
        parameter.copy_(parameter.bfloat16())
    theirs = type(exact).from_pretrained(folder(family), dtype=torch.bfloat16)  # whose angles stay float32
    with LLM(folder(family), dtype="bfloat16", **placed(device), max_num_seqs=3) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    errors = []
    for ids, result in zip(PROMPTS, found, strict=True):
        want = torch.nn.functional.normalize(pooled_models.hidden(exact, ids), dim=-1)
        other = torch.nn.functional.normalize(pooled_models.hidden(theirs, ids).float(), dim=-1)
        errors.append([(torch.as_tensor(x) - want).square().mean().item() for x in (result.outputs.data, other)])
    ours, transformers_own = torch.tensor(errors).mean(0).sqrt().tolist()
    assert ours < 1.2 * transformers_own


def test_distances_fall_into_the_ranges_of_transformers() -> None:
    apart = torch.arange(-700, 701)
    want = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(apart)
    assert torch.equal(buckets(apart, Relative(buckets=32, distance=128)), want)
    deberta = transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position(apart, 256, 512)
    assert torch.equal(log_buckets(apart, Disentangled(256, 512, 1e-7)), deberta.long())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["architectures"][0])
def test_parameters_are_counted_once(config: dict[str, Any]) -> None:
    spec = model_config(config).spec
    assert parameters(spec).total == sum(each.numel() for each in empty_decoder(spec).parameters())


def test_layers_of_albert_are_one_layer() -> None:
    decoder = empty_decoder(model_config({**pooled_configs.ALBERT_BASE, "num_hidden_groups": 3}).spec)
    assert [list(decoder.layers).index(layer) for layer in decoder.layers] == [0] * 4 + [4] * 4 + [8] * 4


def test_half_of_a_window_of_embedding_gemma_lies_to_either_side() -> None:
    config = model_config(pooled_configs.EMBEDDING_GEMMA)
    windows = [layer.attention.window for layer in config.spec.layers]
    assert windows == ([257] * 5 + [None]) * 4
    with torch.device("meta"):
        theirs = transformers.Gemma3TextModel(transformers.AutoConfig.for_model(**pooled_configs.EMBEDDING_GEMMA))
    assert theirs.config.sliding_window == 257
    views = checkpoint_views(empty_decoder(config.spec), config.weights)
    assert {name.removeprefix("model.") for name in views} == theirs.state_dict().keys()


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_long_texts_of_deberta_are_attended_in_blocks(
    device: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disentangled, "BLOCK", 7)
    ids = PROMPTS[-1]
    with LLM(folder("deberta"), dtype="float32", **placed(device), max_num_seqs=3) as llm:
        [found] = llm.encode([{"prompt_token_ids": ids}], pooling_task="token_embed", use_tqdm=False)
    want = torch.nn.functional.normalize(pooled_models.hidden(pooled_models.build("deberta"), ids), dim=-1)
    assert found.outputs.data.numpy() == pytest.approx(want.numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"share_att_key": False}, "share_att_key to False; it must be True"),
        ({"pos_att_type": "c2p"}, "pos_att_type to 'c2p'; it must be p2c and c2p"),
        ({"conv_kernel_size": 3}, "conv_kernel_size to 3; it must be 0"),
        ({"embedding_size": 8}, "embedding_size to 8; it must be hidden_size"),
        ({"position_buckets": 1022}, "position_buckets to 1022; it must be less than twice"),
    ],
)
def test_other_forms_of_deberta_are_refused_by_name(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        model_config({**pooled_configs.DEBERTA_V3, **entries})
