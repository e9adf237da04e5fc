"""The model that ships with the package: it loads, writes Python, and is what its card says."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import EMBEDDED_MODEL

DRAFT = EMBEDDED_MODEL.parent / "embedded-draft"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32") as built:
        yield built


@pytest.mark.dealt
def test_it_writes_python_that_parses(llm: LLM) -> None:
    """Whole functions: at least half of twenty samples parse, once cut to their last complete line block."""
    prompts = ["def read_json(path):", "class LRUCache:", "def main():", "import os\nimport sys\n\n\ndef walk(root):"]
    params = llm.get_default_sampling_params().replace(n=5, max_tokens=120, seed=1)
    texts = [o.prompt + c.text for o in llm.generate(prompts, params) for c in o.outputs]  # type: ignore[operator]
    assert sum(map(parses_in_part, texts)) >= len(texts) // 2


def parses_in_part(text: str) -> bool:
    """Whether some beginning of the text, of at least four lines, is a Python module."""
    lines = text.splitlines()
    for end in range(len(lines), 3, -1):
        try:
            ast.parse("\n".join(lines[:end]))
            return True
        except SyntaxError:
            continue
    return False


def test_greedy_text_equals_transformers(llm: LLM) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    prompt = "def read_json(path):"
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = oracle.generate(
        **inputs, max_new_tokens=48, do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None
    )[0]
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=48))
    assert output.prompt_token_ids + output.outputs[0].token_ids == ids.tolist()


@pytest.mark.parametrize("folder", [EMBEDDED_MODEL, DRAFT])
def test_both_have_one_tokenizer_and_a_card_with_their_score(folder: Path) -> None:
    assert (folder / "tokenizer.json").read_bytes() == (EMBEDDED_MODEL / "tokenizer.json").read_bytes()
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    card = (folder / "README.md").read_text()
    assert "xz -9e" in card
    assert "standard library" in card


def test_the_draft_is_about_a_tenth() -> None:
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (DRAFT, EMBEDDED_MODEL)]
    assert 0.08 < sizes[0] / sizes[1] < 0.12
    assert json.loads((DRAFT / "config.json").read_text())["max_position_embeddings"] >= 1024
