"""Tiny models whose texts are compared by the vectors of their tokens, saved as the first ColBERT, as PyLate and as
sentence-transformers from 6 on save them, and the scores that transformers' states give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import pooled_models

WIDTH = 24
QUERY = "what is the capital of france"
DOCUMENTS = ["paris is the capital", "the lazy dog jumps over", "a fox", "berlin berlin is again the capital of berlin"]
MARKS = {"query": 1, "document": 3}  # [UNK] and [SEP] stand for the markers of queries and documents
SKIPPED = "the"
OWN: dict[str, Any] = {
    "query_prefix": "[UNK]",
    "document_prefix": "[SEP]",
    "query_length": 7,
    "document_length": 9,
    "skiplist_words": [SKIPPED],
}
PYLATE = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
SENTENCE = [
    ("", "sentence_transformers.base.modules.transformer.Transformer"),
    ("1_Dense", "sentence_transformers.base.modules.dense.Dense"),
    ("2_MultiVectorMask", "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
    ("3_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
]
FORMS = ("colbert", "pylate", "sentence")


def projection() -> Tensor:
    return torch.randn(WIDTH, 32, generator=torch.Generator().manual_seed(1))


def save(form: str, folder: Path) -> Path:
    """Save a ColBERT in one of the forms."""
    pooled_models.save("bert", folder)
    if form == "colbert":
        tensors = {f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
        save_file({**tensors, "linear.weight": projection()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
        first = {"dim": WIDTH, "query_token_id": "[UNK]", "doc_token_id": "[SEP]", "query_maxlen": 7, "doc_maxlen": 9}
        (folder / "artifact.metadata").write_text(json.dumps({**first, "mask_punctuation": True}))
        return folder
    listed = PYLATE if form == "pylate" else SENTENCE
    for path, _ in listed:
        (folder / path).mkdir(exist_ok=True)
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(modules))
    dense = {"in_features": 32, "out_features": WIDTH, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": projection()}, folder / "1_Dense" / "model.safetensors")
    own = dict(OWN) if form == "pylate" else {"prompts": {"query": "yes ", "document": "no "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    if form == "sentence":
        (folder / "2_MultiVectorMask" / "config.json").write_text(json.dumps({"skiplist_words": [SKIPPED]}))
        lengths = {"query_length": 7, "document_length": 9}
        (folder / "sentence_bert_config.json").write_text(json.dumps(lengths))
    return folder


def tokens(form: str, which: str, text: str) -> list[int]:
    """What the libraries make of a text: cut, with the marker behind the first token or the prompt before the text."""
    most = 7 if which == "query" else 9
    if form == "sentence":
        text = {"query": "yes ", "document": "no "}[which] + text
        ids = pooled_models.tokenizer("bert").encode(text).ids
        return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]
    ids = pooled_models.tokenizer("bert").encode(text).ids
    ids = ids if len(ids) < most else [*ids[: most - 2], ids[-1]]
    return [ids[0], MARKS[which], *ids[1:]]


def vectors(ids: Sequence[int]) -> Tensor:
    states = pooled_models.hidden(pooled_models.build("bert"), ids) @ projection().T
    return states / states.norm(dim=-1, keepdim=True)


def expected(form: str, query: str, document: str) -> float:
    asked, ids = tokens(form, "query", query), tokens(form, "document", document)
    skipped = pooled_models.WORDS.index(SKIPPED) + 4 if form != "colbert" else -1
    counts = torch.tensor([i != skipped for i in ids])
    return (vectors(asked) @ vectors(ids)[counts].T).max(1).values.sum().item()
