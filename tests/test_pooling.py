"""Models that embed and classify, against transformers in float32: the same vectors for any mix of prompts, whatever
the engine is set to; and the same as sentence-transformers where that is installed.

float32 on vectors of length 1 and on probabilities: 1e-5 is a hundred roundings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline import LLM, PoolingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline.text.pooled import RERANKER_BEGIN, RERANKER_END
from ridgeline.weights.loader import read_model_config
from tests import pooled_models
from tests.devices import DEVICES, placed
from tests.pooled_models import CLASSIFIERS, DECODERS, DENSE, ENCODERS, POSITIONS

TOLERANCE = 1e-5
SHARED = list(range(4, 40))
PROMPTS = ([5], [9] * 40 + [3], SHARED, [*SHARED, 50, 51], [7, 8], list(range(4, 60)), [*SHARED, 50, 52, 53], [9] * 41)
TEXTS = ["the quick brown fox", "paris", "what is the capital of france and then again what is the capital of berlin"]
DOCUMENTS = ["paris is the capital", "the lazy dog jumps over", "a fox", "berlin berlin berlin is again"]
ON_DECODERS = [name for name in CLASSIFIERS if name.startswith(("qwen", "llama", "gemma", "gptj", "deepseek"))]
MEANS = [
    (name, "mean_tokens") for name in ("distilbert", "albert", "mpnet", "nomic_bert", "jina_v3", "embedding_gemma")
]
# Small steps, small blocks and few slots: prompts wait for steps with room, and those of decoders run in chunks
TIGHT: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4, "debug_checks": True}

model = cache(pooled_models.build)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: pooled_models.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def open_llm() -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def build(path: Path, **settings: Any) -> LLM:
        opened.append(LLM(path, **{"dtype": "float32", **placed(settings.get("device", "cpu")), **TIGHT, **settings}))
        return opened[-1]

    yield build
    for llm in opened:
        llm.shutdown()


def as_prompts(prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def near(got: Any, wanted: Tensor) -> None:
    scale = max(1.0, float(wanted.abs().max()))  # vectors as they come from the last norm have numbers up to three
    assert torch.as_tensor(got).numpy() == pytest.approx(wanted.numpy(), abs=TOLERANCE * scale)


def probabilities(family: str, scores: Tensor) -> Tensor:
    multiple = family == "roberta_classifier"
    return torch.sigmoid(scores) if len(scores) == 1 or multiple else scores.softmax(-1)


# ---- vectors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_embeddings_are_transformers(family: str, device: str, folder, open_llm) -> None:
    steps = 24 if family in DECODERS else POSITIONS
    llm = open_llm(folder(family), device=device, max_num_batched_tokens=steps)
    cached = family in DECODERS
    last = cached or family == "embedding_gemma"
    want = [pooled_models.hidden(model(family), prompt)[-1 if last else 0] for prompt in PROMPTS]
    if "t5" in family:
        want = [pooled_models.hidden(model(family), prompt).mean(0) for prompt in PROMPTS]
    for _ in range(2):
        got = llm.embed(as_prompts(PROMPTS), use_tqdm=False)
        for result, vector in zip(got, want, strict=True):
            near(result.outputs.embedding, unit(vector))
    assert any(result.num_cached_tokens for result in got) is cached, "decoders find prompts in the cache"
    raw = llm.embed(as_prompts(PROMPTS), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for result, vector in zip(raw, want, strict=True):
        near(result.outputs.embedding, vector)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_probabilities_of_labels_are_transformers(family: str, device: str, folder, open_llm) -> None:
    steps = 24 if family in ON_DECODERS else POSITIONS
    llm = open_llm(folder(family), device=device, max_num_batched_tokens=steps)
    results = llm.classify(as_prompts(PROMPTS), use_tqdm=False)
    for prompt, result in zip(PROMPTS, results, strict=True):
        want = probabilities(family, pooled_models.logits(model(family), prompt))
        near(result.outputs.probs, want)
        assert result.outputs.num_classes == len(want)
    with pytest.raises(InvalidRequest, match="this model does classify"):
        llm.embed(as_prompts(PROMPTS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["modernbert", "qwen3"])
def test_vectors_of_tokens_are_transformers(family: str, device: str, folder, open_llm) -> None:
    llm = open_llm(folder(family), device=device, max_num_batched_tokens=POSITIONS)
    mixed = [PoolingParams(task="token_embed" if index % 2 else "embed") for index in range(len(PROMPTS))]
    for prompt, params, result in zip(
        PROMPTS, mixed, llm.encode(as_prompts(PROMPTS), mixed, use_tqdm=False), strict=True
    ):
        states = pooled_models.hidden(model(family), prompt)
        one = states[-1 if family == "qwen3" else 0]
        near(result.outputs.data, unit(states if params.task == "token_embed" else one))


@pytest.mark.parametrize("device", DEVICES)
def test_a_decoder_whose_config_says_so_sees_later_tokens(device: str, tmp_path: Path, open_llm) -> None:
    theirs = pooled_models.build("qwen3")
    theirs.config.is_causal = False
    theirs.save_pretrained(tmp_path)
    pooled_models.tokenizer("qwen3").save(str(tmp_path / "tokenizer.json"))
    llm = open_llm(tmp_path, device=device, max_num_batched_tokens=POSITIONS)
    for prompt, result in zip(PROMPTS, llm.embed(as_prompts(PROMPTS), use_tqdm=False), strict=True):
        everything = torch.ones(1, 1, len(prompt), len(prompt), dtype=torch.bool)
        with torch.inference_mode():
            states = theirs(torch.tensor([prompt]), attention_mask=everything).last_hidden_state[0]
        near(result.outputs.embedding, unit(states[-1]))
    with pytest.raises(InvalidConfig, match="runner is generate, and this model embeds"):
        open_llm(tmp_path, runner="generate")


def test_kernels_of_a_gpu_give_the_same_vectors(folder, open_llm) -> None:
    ops = {"packed_attention": "triton", "layer_norm": "triton", "embedding": "triton"}
    llm = open_llm(folder("modernbert"), kernels=ops, max_num_batched_tokens=POSITIONS)
    for prompt, result in zip(PROMPTS, llm.embed(as_prompts(PROMPTS), use_tqdm=False), strict=True):
        near(result.outputs.embedding, unit(pooled_models.hidden(model("modernbert"), prompt)[0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_rehearsal_leaves_nothing_behind(family: str, device: str, folder, open_llm) -> None:
    llm = open_llm(folder(family), device=device, max_num_batched_tokens=8 * POSITIONS, max_num_seqs=6)
    largest, submit = [0], llm.engine._worker.submit
    llm.engine._worker.submit = lambda plan: (largest.append(plan.num_tokens), submit(plan))[1]
    llm.engine.rehearse()
    assert not llm.engine.has_work
    assert {1, 2, 4} <= {tokens // POSITIONS for tokens in largest}, "kernels for larger steps are prepared too"
    [result] = llm.embed({"prompt_token_ids": PROMPTS[2]}, use_tqdm=False)
    assert result.num_cached_tokens == 0
    near(
        result.outputs.embedding, unit(pooled_models.hidden(model(family), PROMPTS[2])[-1 if family == "qwen3" else 0])
    )


def test_an_encoder_can_be_quantized(folder, open_llm) -> None:
    llm = open_llm(folder("bert"), quantization="int8", kernels={"int8_linear": "reference"})
    got = llm.embed(as_prompts(PROMPTS), use_tqdm=False)
    for prompt, result in zip(PROMPTS, got, strict=True):
        want = unit(pooled_models.hidden(model("bert"), prompt)[0])
        assert torch.tensor(result.outputs.embedding) @ want > 0.99


# ---- folders of sentence-transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "mode", "dense", "normalize"),
    [
        ("bert", "mean_tokens", True, False),
        ("roberta", "cls_token", False, True),
        ("modernbert", "mean_tokens", False, True),
        ("qwen3", "lasttoken", False, True),
        ("mpnet", "mean_tokens", True, True),
        ("embedding_gemma", "mean_tokens", True, True),
        ("t5_encoder", "mean_tokens", True, True),
        ("qwen3", "mean_tokens", False, False),
    ],
)
def test_folders_of_sentence_transformers_give_its_vectors(
    family: str, mode: str, dense: bool, normalize: bool, device: str, tmp_path: Path, open_llm
) -> None:
    prompts = {"query": "what is "}
    path = pooled_models.sentence_folder(
        family, tmp_path / "model", mode, dense=dense, normalize=normalize, prompts=prompts
    )
    llm = open_llm(path, device=device)
    got = torch.tensor([result.outputs.embedding for result in llm.embed(TEXTS, use_tqdm=False)])
    asked = torch.tensor([result.outputs.embedding for result in llm.embed(TEXTS, prompt_name="query", use_tqdm=False)])
    assert got.shape == (3, DENSE if dense else model(family).config.hidden_size)
    backend = pooled_models.tokenizer(family)
    for before, vectors in (("", got), ("what is ", asked)):
        states = [pooled_models.hidden(model(family), backend.encode(before + text).ids) for text in TEXTS]
        pick = {"mean_tokens": lambda x: x.mean(0), "cls_token": lambda x: x[0], "lasttoken": lambda x: x[-1]}[mode]
        want = torch.stack([pick(each) for each in states])
        if dense:
            from safetensors.torch import load_file

            layer = load_file(path / "2_Dense" / "model.safetensors")
            want = torch.tanh(want @ layer["linear.weight"].T + layer["linear.bias"])
        near(vectors, unit(want) if normalize else want)


@pytest.mark.clients
@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize(("family", "mode"), [("bert", "mean_tokens"), ("qwen3", "lasttoken"), *MEANS])
def test_vectors_are_those_of_sentence_transformers(
    family: str, mode: str, version: int, tmp_path: Path, open_llm
) -> None:
    """Of texts that it cuts and writes small, too, and of a folder that the version at hand saves itself."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    written = {"dense": family == "bert", "prompts": {"query": "what is "}, "version": version}
    path = pooled_models.sentence_folder(family, tmp_path / "model", mode, **written, longest=6, lower=True)
    theirs = library.SentenceTransformer(str(path), device="cpu")
    theirs.save(str(tmp_path / "saved"))
    for folder in (path, tmp_path / "saved"):
        llm, texts = open_llm(folder), [*TEXTS, "PARIS Is the lazy dog again and again"]
        for name in (None, "query"):
            results = llm.embed(texts, prompt_name=name, truncate_prompt_tokens=-1, use_tqdm=False)
            near([each.outputs.embedding for each in results], torch.from_numpy(theirs.encode(texts, prompt_name=name)))
            assert max(len(each.prompt_token_ids) for each in results) == 6


@pytest.mark.clients
def test_scores_are_those_of_a_cross_encoder_that_the_library_saves(tmp_path: Path, folder, open_llm) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = str(folder("bert_reranker"))
    for name, options in (("plain", {}), ("raw", {"activation_fn": torch.nn.Identity(), "max_length": 9})):
        theirs = library.CrossEncoder(path, device="cpu", **options)
        theirs.save_pretrained(str(tmp_path / name))
        params = PoolingParams(truncate_prompt_tokens=-1)
        results = open_llm(tmp_path / name).score(TEXTS[0], DOCUMENTS, pooling_params=params, use_tqdm=False)
        want = torch.from_numpy(theirs.predict([(TEXTS[0], each) for each in DOCUMENTS]))
        near([each.outputs.score for each in results], want)


NAME, TOKENIZER = "sentence_bert_config.json", {"tokenizer_config.json": {"model_max_length": 20}}


@pytest.mark.parametrize(
    ("files", "longest"),
    [
        ({NAME: {"max_seq_length": 8, "do_lower_case": False}}, 8),
        ({"sentence_xlm-roberta_config.json": {"max_seq_length": 9}, **TOKENIZER}, 9),
        ({NAME: {"max_seq_length": None}, **TOKENIZER}, 20),
        ({NAME: {"transformer_task": "feature-extraction"}, **TOKENIZER}, 20),
        ({NAME: {"tokenizer_args": {"model_max_length": 7}, "max_seq_length": 8}}, 7),
        ({NAME: {"processor_kwargs": {"model_max_length": 7}}, **TOKENIZER}, 7),
        ({NAME: {"processing_kwargs": {"text": {"max_length": 5}}, "max_seq_length": 8}}, 5),
        ({NAME: {"processing_kwargs": [1], "max_seq_length": -1}}, POSITIONS),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, POSITIONS),
        ({"tokenizer_config.json": {"model_max_length": "many"}}, POSITIONS),
    ],
    ids=str,
)
def test_the_longest_text_is_that_of_any_version_of_sentence_transformers(
    files: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    path = pooled_models.sentence_folder("bert", tmp_path / "model", "mean_tokens")
    (path / "sentence_bert_config.json").unlink()
    (path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    assert read_model_config(path).spec.max_position_embeddings == longest


@pytest.mark.parametrize("version", [3, 6])
def test_texts_are_made_small_where_sentence_transformers_does_so(version: int, tmp_path: Path, open_llm) -> None:
    path = pooled_models.sentence_folder("bert", tmp_path / "model", "mean_tokens", version=version, lower=True)
    small, large = open_llm(path).embed([TEXTS[0], TEXTS[0].upper()], use_tqdm=False)
    assert small.prompt_token_ids == large.prompt_token_ids == pooled_models.tokenizer("bert").encode(TEXTS[0]).ids


def test_a_cross_encoders_own_file_says_what_makes_probabilities(tmp_path: Path, open_llm) -> None:
    """As sentence-transformers writes it from 5.4 on; tests/models/pooled_configs.py has the older form."""
    path = pooled_models.save("bert_reranker", tmp_path)
    written = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(written))
    [result] = open_llm(path).score(TEXTS[0], DOCUMENTS[0], use_tqdm=False)
    pair = pooled_models.tokenizer("bert_reranker").encode(TEXTS[0], DOCUMENTS[0])
    near([result.outputs.score], pooled_models.logits(model("bert_reranker"), pair.ids, pair.type_ids))


@pytest.mark.parametrize("version", [5, 6])
def test_a_prompt_ends_where_sentence_transformers_cuts_it(version: int, tmp_path: Path, open_llm) -> None:
    path = pooled_models.sentence_folder("bert", tmp_path / "model", "mean_tokens", longest=6, version=version)
    llm = open_llm(path)
    with pytest.raises(InvalidRequest, match=r"prompt has 17 tokens and the model takes 6; shorten it"):
        llm.embed(TEXTS[2])
    [cut] = llm.embed(TEXTS[2], truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == [2, *pooled_models.tokenizer("bert").encode(TEXTS[2]).ids[1:5], 3]
    [shorter] = llm.embed(TEXTS[2], truncate_prompt_tokens=3, use_tqdm=False)
    assert shorter.prompt_token_ids == [*cut.prompt_token_ids[:2], 3]
    [ids] = llm.embed({"prompt_token_ids": list(range(4, 30))}, truncate_prompt_tokens=4, use_tqdm=False)
    assert ids.prompt_token_ids == [4, 5, 6, 7]
    for wrong in (0, -2, 7, True):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            llm.embed(TEXTS[0], truncate_prompt_tokens=wrong)


def test_shorter_embeddings_have_length_one_again(folder, open_llm) -> None:
    llm = open_llm(folder("bert"))
    [whole], [cut] = (llm.embed([TEXTS[0]], dimensions=size, use_tqdm=False) for size in (None, 8))
    near(cut.outputs.embedding, unit(torch.tensor(whole.outputs.embedding)[:8]))
    assert cut.outputs.hidden_size == 8
    for wrong in (0, 33):
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed(TEXTS, dimensions=wrong)


# ---- pairs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert_reranker", "xlm_roberta_reranker"])
def test_pairs_are_scored_as_by_transformers(family: str, folder, open_llm) -> None:
    llm = open_llm(folder(family))
    backend = pooled_models.tokenizer(family)
    want = []
    for document in DOCUMENTS:
        pair = backend.encode(TEXTS[0], document)
        types = pair.type_ids if family.startswith("bert") else None
        want.append(torch.sigmoid(pooled_models.logits(model(family), pair.ids, types)).item())
    got = llm.score(TEXTS[0], DOCUMENTS, use_tqdm=False)
    assert [result.outputs.score for result in got] == pytest.approx(want, abs=TOLERANCE)
    ranked = llm.rerank(TEXTS[0], DOCUMENTS, top_n=3, use_tqdm=False)
    assert [each.index for each in ranked] == sorted(range(4), key=lambda i: -want[i])[:3]
    assert [each.document for each in ranked] == [DOCUMENTS[each.index] for each in ranked]
    each = llm.score(DOCUMENTS, DOCUMENTS[::-1], use_tqdm=False)
    one_by_one = [llm.score(a, b, use_tqdm=False)[0] for a, b in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [r.outputs.score for r in each] == pytest.approx([r.outputs.score for r in one_by_one], abs=TOLERANCE)


def test_of_a_pair_that_is_cut_the_longer_text_loses_first(folder, open_llm) -> None:
    llm = open_llm(folder("bert_reranker"))
    params = PoolingParams(truncate_prompt_tokens=9)
    [result] = llm.score("a fox", TEXTS[2], pooling_params=params, use_tqdm=False)
    backend = pooled_models.tokenizer("bert_reranker")
    assert result.prompt_token_ids == backend.encode("a fox", "what is the capital").ids


def test_types_of_a_pair_matter_to_bert(folder, open_llm) -> None:
    llm = open_llm(folder("bert_reranker"))
    [pair] = llm.score(TEXTS[0], DOCUMENTS[0], use_tqdm=False)
    [one_type] = llm.classify({"prompt_token_ids": pair.prompt_token_ids}, use_tqdm=False)
    assert pair.outputs.score != pytest.approx(one_type.outputs.probs[0], abs=1e-3)


def test_embeddings_are_compared_by_their_angle(folder, open_llm) -> None:
    llm = open_llm(folder("bert"))
    query, *documents = (np.array(each.outputs.embedding) for each in llm.embed([TEXTS[0], *DOCUMENTS], use_tqdm=False))
    got = [result.outputs.score for result in llm.score(TEXTS[0], DOCUMENTS, use_tqdm=False)]
    assert got == pytest.approx([float(query @ each) for each in documents], abs=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_that_says_yes_or_no_reranks(tied: bool, tmp_path: Path, open_llm) -> None:
    causal = pooled_models.build("qwen3_reranker")
    if not tied:
        causal.config.tie_word_embeddings = False
        causal.lm_head.weight = torch.nn.Parameter(torch.randn(pooled_models.VOCAB, 32))
    pooled_models.save("qwen3_reranker", tmp_path)
    causal.save_pretrained(tmp_path)
    llm = open_llm(tmp_path, convert="classify", max_num_batched_tokens=24)
    got = llm.score(TEXTS[0], DOCUMENTS, use_tqdm=False, instruction="is a fox")
    backend = pooled_models.tokenizer("qwen3_reranker")
    yes, no = (pooled_models.WORDS.index(word) + 4 for word in ("yes", "no"))
    for document, result in zip(DOCUMENTS, got, strict=True):
        middle = f"<Instruct>: is a fox\n<Query>: {TEXTS[0]}\n<Document>: {document}"
        parts = (RERANKER_BEGIN, middle, RERANKER_END)
        ids = [i for part in parts for i in backend.encode(part, add_special_tokens=False).ids]
        with torch.inference_mode():
            scores = causal(torch.tensor([ids])).logits[0, -1, [no, yes]]
        near([result.outputs.score], scores.softmax(-1)[1:])
        assert result.prompt_token_ids == ids


# ---- what cannot be -----------------------------------------------------------------------------------------------


def test_a_wrong_call_gets_one_sentence(folder, open_llm) -> None:
    llm = open_llm(folder("bert_classifier"))
    for call, told in (
        (lambda: llm.generate(TEXTS), "embeds or classifies and cannot generate"),
        (lambda: llm.embed(TEXTS), "does classify and token_classify, and not embed"),
        (lambda: llm.score(TEXTS, TEXTS), "3 labels"),
        (lambda: llm.classify([]), ""),
        (lambda: llm.classify([{"prompt_token_ids": []}]), "the prompt is empty"),
        (lambda: llm.classify([{"prompt_token_ids": [64]}]), "outside the vocabulary"),
        (lambda: llm.classify([3]), "a prompt is a string or"),
        (lambda: llm.encode(TEXTS, [PoolingParams()]), "a list of 3 of them"),
        (lambda: llm.encode(TEXTS, pooling_task="rank"), "unknown task 'rank'"),
        (lambda: llm.embed(TEXTS, prompt_name="query"), "prompt_name is 'query'"),
    ):
        if not told:
            assert call() == []
            continue
        with pytest.raises(InvalidRequest, match=told):
            call()
    assert len(llm.classify(TEXTS, use_tqdm=False)) == 3, "nothing of that hurt the engine"


def test_a_prompt_that_must_run_whole_needs_a_step_with_room(folder, open_llm) -> None:
    llm = open_llm(folder("bert"), max_num_batched_tokens=16)
    with pytest.raises(InvalidRequest, match="must run in one step, and a step has room for 16"):
        llm.embed({"prompt_token_ids": [5] * 17})
    longest = open_llm(folder("bert"), max_num_seqs=1)
    assert len(longest.embed({"prompt_token_ids": [5] * POSITIONS}, use_tqdm=False)) == 1, "all positions are used"


def test_runner_and_convert_say_what_a_model_is(folder, tmp_path: Path, open_llm) -> None:
    with pytest.raises(InvalidConfig, match="runner is generate, and this model embeds"):
        open_llm(folder("bert"), runner="generate")
    with pytest.raises(InvalidConfig, match="convert is classify, and the model has no map"):
        open_llm(folder("bert"), convert="classify")
    with pytest.raises(InvalidConfig, match="convert is embed, and the model classifies"):
        open_llm(folder("bert_classifier"), convert="embed")
    with pytest.raises(InvalidConfig, match="runs on one device"):
        open_llm(folder("bert"), tensor_parallel_size=2)
    decoder = open_llm(folder("qwen3_reranker"), runner="pooling")
    [result] = decoder.embed({"prompt_token_ids": PROMPTS[2]}, use_tqdm=False)
    near(result.outputs.embedding, unit(pooled_models.hidden(model("qwen3_reranker").model, PROMPTS[2])[-1]))
    generates = open_llm(folder("qwen3_reranker"))
    with pytest.raises(InvalidRequest, match="this model generates; load it with runner='pooling'"):
        generates.embed(TEXTS)
    with pytest.raises(InvalidRequest, match="scores take no pooling_params or instruction"):
        generates.score(TEXTS, [[[5]]] * 3, instruction="what is")
    sentence = pooled_models.sentence_folder("bert", tmp_path / "max", "max_tokens")
    with pytest.raises(ModelLoadError, match="the pooling is max; known: cls, mean, lasttoken"):
        open_llm(sentence)
    sentence = pooled_models.sentence_folder("bert", tmp_path / "order", "mean_tokens", dense=True, normalize=True)
    listed = json.loads((sentence / "modules.json").read_text())
    for order in ([0, 1, 3, 2], [0, 1, 1, 2], [0, 3, 1, 2]):
        (sentence / "modules.json").write_text(json.dumps([listed[place] for place in order]))
        with pytest.raises(ModelLoadError, match="one Pooling may stand before Dense modules"):
            open_llm(sentence)
    listed[1]["path"] = "a/" * 3000
    (sentence / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelLoadError, match="copy it again"):
        open_llm(sentence)


def test_an_interrupted_call_leaves_an_engine_that_works(folder, open_llm, monkeypatch) -> None:
    llm = open_llm(folder("bert"), max_num_batched_tokens=POSITIONS)
    step, calls = llm.engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.embed(as_prompts(PROMPTS), use_tqdm=False)
    assert not llm.engine.has_work
    [result] = llm.embed({"prompt_token_ids": PROMPTS[1]}, use_tqdm=False)
    near(result.outputs.embedding, unit(pooled_models.hidden(model("bert"), PROMPTS[1])[0]))


def test_vectors_that_are_no_numbers_end_their_request_alone(folder, open_llm) -> None:
    llm = open_llm(folder("bert"))
    table = llm.assembly.local.runner.decoder.embed.weight
    with torch.no_grad():
        table[60] = torch.nan
    from ridgeline.core.errors import RidgelineError

    with pytest.raises(RidgelineError, match="not numbers"):
        llm.embed({"prompt_token_ids": [60, 5]}, use_tqdm=False)
    [result] = llm.embed({"prompt_token_ids": PROMPTS[1]}, use_tqdm=False)
    near(result.outputs.embedding, unit(pooled_models.hidden(model("bert"), PROMPTS[1])[0]))
