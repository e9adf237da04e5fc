"""How far the engine's log-probabilities on a GPU are from float32's, in units of what transformers loses in the same
dtype. Prompts whole and op by op, prompts in chunks beside decoding requests, and decode steps, both in graphs.

The models are random, wide enough that errors average out, and scaled so that logits have a standard deviation of about
three: flat ones would hide errors, and peaked ones blow them up by chance. Decoding is sampled; what was drawn is then
given to the oracles as text, so each scores the same tokens after the same past.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import StepPlan
from ridgeline.kernels.ops import OPS
from ridgeline.worker.step import PlannedStep
from tests import tiny_models
from tests.driving import Rig, ask, rig

pytestmark = pytest.mark.gpu

ALLOWED = 1.2  # times the other's error
VOCAB, WIDTH = 2048, 256
WINDOW = 48

_LLAMA = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 704, "max_position_embeddings": 512}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "num_hidden_layers": 4},
    "llama3": {**_LLAMA, "num_hidden_layers": 4, "head_dim": 128},
    "qwen3": {**_LLAMA, "num_hidden_layers": 4, "head_dim": 128},
    "mistral": {**_LLAMA, "num_hidden_layers": 4, "sliding_window": WINDOW},
    "mixed": {**_LLAMA, "head_dim": 64, "sliding_window": WINDOW},
    "gpt2": {"vocab_size": VOCAB, "n_positions": 512, "n_embd": WIDTH, "n_layer": 4},
    "lfm2": {**_LLAMA, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "falcon_h1": {**_LLAMA, "num_hidden_layers": 4, "mamba_d_ssm": 512, "mamba_d_state": 64, "mamba_chunk_size": 64},
}

Logits = dict[tuple[str, int], Tensor]  # (request, tokens of its past) → a row of logits, float32


class Text(NamedTuple):
    """A request's tokens, drawn ones included."""

    name: str
    tokens: Sequence[int]


@cache
def oracle(family: str) -> transformers.PreTrainedModel:
    """In float32 on the GPU. Products have a gain of 1.3, logits a standard deviation of three."""
    model = tiny_models.build(family, **CHANGES[family])
    generator = torch.Generator().manual_seed(len(family))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            inside = "layers." in name or ".h." in name
            inputs = parameter.shape[0 if family == "gpt2" and inside else 1]
            with torch.no_grad():
                parameter.normal_(0, (1.3 if inside else 3) * inputs**-0.5, generator=generator)
    return model.cuda()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in CHANGES}
    for family, folder in made.items():
        oracle(family).save_pretrained(folder)
    return made


@pytest.fixture(autouse=True)
def float32_is_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def record(own: Rig) -> Logits:
    """What the runner scores from now on: every token of a step without a graph, else every row's last."""
    found: Logits = {}
    runner, forward = own.runner, own.runner.forward

    def recording(plan: StepPlan) -> PlannedStep:
        step = forward(plan)
        scores, first = step.device, 0
        with torch.inference_mode():
            every_TV = None if scores.hidden is None else runner.decoder.logits(scores.hidden).float()
            last_RV = scores.logits_RU.float()
        for row, count in enumerate(plan.rows.num_tokens_R.tolist()):
            name = NAMES[runner.slots.forms[int(plan.rows.slots_R[row])].prompt]
            end = int(plan.kv_bound_R[row])
            found[name, end] = last_RV[row]
            if every_TV is not None:
                found.update({(name, end - count + 1 + i): every_TV[first + i] for i in range(count)})
            first += count
        return step

    runner.forward = recording  # type: ignore[method-assign]
    return found


def requests(lengths: Sequence[int], max_tokens: int) -> list[Request]:
    asked = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 + length)
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        asked.append(ask(f"r{index}", prompt, max_tokens=max_tokens, temperature=1.0, seed=index, ignore_eos=True))
        NAMES[tuple(prompt)] = asked[-1].id
    return asked


NAMES: dict[tuple[int, ...], str] = {}


def score(model: transformers.PreTrainedModel, texts: Sequence[Text], wanted: Sequence[tuple[str, int]]) -> Tensor:
    """float32 log-probabilities [N, V] of `wanted`, each text read in one piece."""
    row_of = {text.name: row for row, text in enumerate(texts)}
    ids = torch.zeros(len(texts), max(len(text.tokens) for text in texts), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
    with torch.inference_mode():
        logits_BSV = model(ids.cuda(), attention_mask=torch.ones_like(ids).cuda()).logits
    rows, places = zip(*((row_of[name], end - 1) for name, end in wanted), strict=True)
    return logits_BSV[list(rows), list(places)].float().log_softmax(-1)


def errors(family: str, dtype: str, texts: Sequence[Text], found: Logits) -> tuple[float, float]:
    """Root-mean-square errors of the log-probabilities, ours and transformers'."""
    wanted = [(name, end) for name, end in found if end <= len(dict(texts)[name])]
    exact_NV = score(oracle(family), texts, wanted)
    theirs_NV = score(copy.deepcopy(oracle(family)).to(getattr(torch, dtype)), texts, wanted)
    ours_NV = torch.stack([found[key] for key in wanted]).log_softmax(-1)
    ours, theirs = ((x_NV - exact_NV).square().mean().sqrt().item() for x_NV in (ours_NV, theirs_NV))
    print(f"{family} {dtype}: {len(wanted)} positions, ours {ours:.5f}, transformers {theirs:.5f}: {ours / theirs:.3f}")
    return ours, theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", CHANGES)
def test_prompts_lose_no_more_than_in_transformers(folders: Mapping[str, Path], family: str, dtype: str) -> None:
    """And little more than plain ops do that round nowhere inside."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "block_size": 64, "kv_cache_memory": 1 << 26}
    asked = requests([300 + 20 * i for i in range(4)], 1)
    texts = [Text(request.id, request.prompt_token_ids) for request in asked]
    both = []
    for kernels in ({}, dict.fromkeys(OPS, "reference")):
        options |= {"device": "cuda", "enforce_eager": True, "kernels": kernels}
        with rig(folders[family], dtype=dtype, **options) as own:
            found = record(own)
            own.run(*asked)
            assert not own.errors
        assert len(found) == sum(len(request.prompt_token_ids) for request in asked)
        both.append(errors(family, dtype, texts, found))
    (ours, theirs), (plain, _) = both
    assert ours <= ALLOWED * theirs
    assert ours <= ALLOWED * plain


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bfloat16") for family in CHANGES), ("llama", "float16"), ("qwen3", "float16")]
)
def test_graphs_lose_no_more_than_transformers(folders: Mapping[str, Path], family: str, dtype: str) -> None:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 64, "kv_cache_memory": 1 << 26}
    asked = requests([5 + 11 * i for i in range(12)], 60)
    with rig(folders[family], device="cuda", dtype=dtype, **options) as own:
        found = record(own)
        outcomes = own.run(*asked)
        assert not own.errors
    assert len(found) > 60 * len(asked)
    texts = [Text(request.id, (*request.prompt_token_ids, *outcomes[request.id].tokens)) for request in asked]
    ours, theirs = errors(family, dtype, texts, found)
    assert ours <= ALLOWED * theirs
