"""Poolings over the head of a masked language model (SPLADE), against transformers in float32: 1e-5 of numbers of order
one is a hundred roundings; and the same as sentence-transformers where that is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline import LLM
from ridgeline.core.errors import ModelLoadError
from ridgeline.worker import pooling
from tests import pooled_models
from tests.devices import DEVICES, placed

ROOM = "sentence_transformers.sparse_encoder.models"
TEXTS = ["the quick brown fox", "paris", "what is the capital of france and then again what is the capital of berlin"]
FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**pooled_models._ODD, hidden_act="gelu_new")),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**pooled_models._DISTIL)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**pooled_models._ROBERTA)),
    "mpnet": lambda: transformers.MPNetForMaskedLM(transformers.MPNetConfig(**pooled_models._MPNET)),
}


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share the texts' tokenizer with others that pool, under other families' names."""
    for family, make in FAMILIES.items():
        monkeypatch.setitem(pooled_models.FAMILIES, f"{family}_masked", make)


def save(family: str, folder: Path, **settings: str) -> Path:
    pooled_models.save(f"{family}_masked", folder)
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": None, **settings}))
    kinds = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{ROOM}.{kind}"} for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "SparseEncoder", "prompts": {}})
    )
    return folder


@torch.inference_mode()
def expected(family: str, settings: dict[str, str], ids: list[int]) -> torch.Tensor:
    scores = pooled_models.build(f"{family}_masked")(torch.tensor([ids])).logits[0]
    found = scores.relu().log1p()
    if settings.get("activation_function") == "log1p_relu":
        found = found.log1p()
    return found.sum(0) if settings.get("pooling_strategy") == "sum" else found.amax(0)


def vectors(folder: Path, device: str = "cpu", **settings: Any) -> list[Any]:
    with LLM(folder, dtype="float32", **placed(device), max_num_seqs=3, debug_checks=True, **settings) as llm:
        return llm.embed(TEXTS, use_tqdm=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {"pooling_strategy": "max", "activation_function": "relu"}),
        ("distilbert", {"pooling_strategy": "max", "activation_function": "log1p_relu"}),
        ("roberta", {"pooling_strategy": "sum"}),
        ("mpnet", {}),
    ],
    ids=str,
)
def test_vectors_have_a_number_for_every_token_of_the_vocabulary(
    family: str, settings: dict[str, str], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "AT_ONCE", 5)  # of up to 19 tokens
    for result in vectors(save(family, tmp_path, **settings), device):
        want = expected(family, settings, result.prompt_token_ids)
        assert result.outputs.embedding == pytest.approx(want.tolist(), abs=1e-5)
        assert min(result.outputs.embedding) == 0 < max(result.outputs.embedding)


def test_vllms_name_asks_for_it_too(tmp_path: Path) -> None:
    folder = pooled_models.save("bert_masked", tmp_path)
    override = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    for result in vectors(folder, hf_overrides=override):
        want = expected("bert", {}, result.prompt_token_ids)
        assert result.outputs.embedding == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("bert", {"pooling_strategy": "mean"}, "SPLADE's pooling is 'mean' of 'relu'"),
        ("bert", {"activation_function": "elu"}, "SPLADE's pooling is 'max' of 'elu'"),
    ],
)
def test_other_poolings_are_refused_by_name(family: str, settings: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=told):
        vectors(save(family, tmp_path, **settings))


@pytest.mark.clients
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    theirs = library.SparseEncoder(str(save(family, tmp_path / "model")), device="cpu")
    want = theirs.encode(TEXTS, convert_to_sparse_tensor=False)
    theirs.save_pretrained(str(tmp_path / "saved"))
    for folder in (tmp_path / "model", tmp_path / "saved"):
        for result, vector in zip(vectors(folder), want, strict=True):
            assert result.outputs.embedding == pytest.approx(vector.tolist(), abs=1e-5)
