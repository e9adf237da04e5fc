"""Models whose texts are compared by the vectors of their tokens (ColBERT), and reward models, which score tokens,
against transformers in float32: 1e-5 is a hundred roundings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ridgeline import LLM, PoolingParams
from ridgeline.core.errors import InvalidRequest, ModelLoadError
from tests import pooled_models
from tests.devices import DEVICES, placed
from tests.late_models import DOCUMENTS, FORMS, QUERY, SKIPPED, expected, save, vectors

TOLERANCE = 1e-5


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def build(path: Path, device: str = "cpu", **settings: Any) -> LLM:
        opened.append(LLM(path, dtype="float32", **placed(device), max_num_seqs=3, debug_checks=True, **settings))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_texts_are_compared_by_the_vectors_of_their_tokens(form: str, device: str, tmp_path: Path, open_llm) -> None:
    llm = open_llm(save(form, tmp_path), device)
    want = [expected(form, QUERY, document) for document in DOCUMENTS]
    scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert scores == pytest.approx(want, abs=TOLERANCE)
    ranked = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False)
    assert [each.index for each in ranked] == sorted(range(4), key=lambda index: -want[index])
    both = llm.score(DOCUMENTS, DOCUMENTS[::-1], use_tqdm=False)
    pairs = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
    assert [each.outputs.score for each in both] == pytest.approx([expected(form, *pair) for pair in pairs], abs=1e-5)
    [found] = llm.encode([QUERY], use_tqdm=False)
    ids = pooled_models.tokenizer("bert").encode(QUERY).ids
    assert found.outputs.data.numpy() == pytest.approx(vectors(ids).numpy(), abs=TOLERANCE)
    with pytest.raises(InvalidRequest, match="this model does token_embed, and not embed"):
        llm.embed([QUERY])
    assert llm.score(QUERY, SKIPPED, use_tqdm=False)[0].outputs.score > 0, "special tokens still count"


def test_a_residual_map_is_refused_by_name(tmp_path: Path, open_llm) -> None:
    file = save("pylate", tmp_path) / "1_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_residual": True}))
    with pytest.raises(ModelLoadError, match="use_residual"):
        open_llm(tmp_path)


@pytest.mark.clients
@pytest.mark.parametrize("form", ["pylate", "sentence"])
def test_scores_are_those_of_sentence_transformers(form: str, tmp_path: Path, open_llm) -> None:
    """Without the tokens by which it lengthens queries, which do not run here."""
    library = pytest.importorskip("sentence_transformers", minversion="6.0", reason="sentence-transformers is missing")
    folder = save(form, tmp_path)
    if form == "pylate":
        file = folder / "config_sentence_transformers.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "do_query_expansion": False}))
    theirs = library.MultiVectorEncoder(str(folder), device="cpu")
    want = theirs.similarity(theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS))[0]
    scores = [each.outputs.score for each in open_llm(folder).score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert scores == pytest.approx(want.tolist(), abs=TOLERANCE)


# ---- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "outputs"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
@torch.inference_mode()
def test_rewards_are_those_of_the_published_head_on_transformers(
    name: str, outputs: int, device: str, tmp_path: Path, open_llm
) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 52, "num_hidden_layers": 2}
    config = transformers.Qwen2Config(vocab_size=67, hidden_size=60, max_position_embeddings=120, **sizes)
    torch.manual_seed(0)
    decoder = transformers.Qwen2Model(config).eval()
    score = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.ReLU(), torch.nn.Linear(60, outputs))
    tensors = {f"model.{key}": value for key, value in decoder.state_dict().items()}
    save_file(
        tensors | {f"score.{key}": value for key, value in score.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [name], "step_tag_id": 9}))
    prompts = [[5, 6, 9, 7, 8, 9], list(range(4, 60)), [9], [11, 12, 13]]
    llm = open_llm(tmp_path, device, skip_tokenizer_init=True, max_num_batched_tokens=64)
    found = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, result in zip(prompts, found, strict=True):
        want = score(decoder(torch.tensor([ids])).last_hidden_state[0])
        if outputs == 2:
            want = want.softmax(-1)[torch.tensor(ids) == 9]
        assert result.outputs.data.numpy() == pytest.approx(want.numpy(), abs=TOLERANCE)
    with pytest.raises(InvalidRequest, match="does token_classify, and not classify"):
        llm.classify([{"prompt_token_ids": [5]}])
    with pytest.raises(InvalidRequest, match="gives rewards to tokens and compares no texts"):
        llm.score("a", "b", pooling_params=PoolingParams())
