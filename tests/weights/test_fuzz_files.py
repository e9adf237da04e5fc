"""Untrusted files: for any content the answer is a model or one sentence, in bounded time and memory.

`python -m ridgeline_bench.scripts.attacks.files` runs thousands of such cases; a few hundred run here.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest, ModelLoadError, RidgelineError, one_line
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.gguf_file import read_gguf
from ridgeline.weights.formats.json_file import MAX_BYTES, read_json
from ridgeline_bench.scripts.attacks.files import outcomes, write
from tests.damaged_files import DAMAGES, Case, Gguf, case, config_of, tokenizer_of

LLAMA = "LlamaForCausalLM"


def test_damaged_files_are_loaded_or_refused_with_a_sentence() -> None:
    found = list(outcomes(seed=5, first=0, cases=70))
    counts = Counter(each["outcome"] for each in found)
    assert counts["refused"] + counts["loaded"] == len(found) == 70, [
        each for each in found if each["outcome"] not in ("refused", "loaded")
    ]
    assert {each["kind"] for each in found} == set(DAMAGES)
    assert min(counts["refused"], counts["loaded"]) > 12  # both sides of the line are reached


def test_a_case_is_the_same_again() -> None:
    assert [case(3, number) for number in range(40)] == [case(3, number) for number in range(40)]


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        (LLAMA, "head_dim", 10**6),
        (LLAMA, "intermediate_size", 10**6),
        (LLAMA, "num_hidden_layers", 2**24),
        (LLAMA, "num_hidden_layers", 1000),
        (LLAMA, "num_attention_heads", 2**24),
        (LLAMA, "vocab_size", 2**24),
        (LLAMA, "max_position_embeddings", 2**24),
        ("Qwen3MoeForCausalLM", "num_experts", 4096),
        ("Qwen3MoeForCausalLM", "moe_intermediate_size", 10**5),
        ("GraniteMoeForCausalLM", "num_local_experts", 4096),
        ("DeepseekForCausalLM", "n_shared_experts", 4096),
        ("Glm4MoeForCausalLM", "n_routed_experts", 2**24),
        ("Qwen3_5ForCausalLM", "linear_num_value_heads", 2**20),
        ("Qwen3_5ForCausalLM", "linear_key_head_dim", 2**24),
        ("JambaForCausalLM", "mamba_d_state", 2**24),
        ("FalconH1ForCausalLM", "mamba_d_ssm", 2**24),
        ("Zamba2ForCausalLM", "mamba_d_state", 2**24),
        ("Lfm2ForCausalLM", "conv_L_cache", 1024),
    ],
)
def test_a_lie_about_a_size_costs_nothing(tmp_path: Path, architecture: str, name: str, value: int) -> None:
    """Before the files were compared with the config, head_dim 10**6 took 28 s and 2.8 GB."""
    damaged = json.dumps({**config_of(architecture), name: value}).encode()
    folder = write(Case(architecture, "config.json", damaged), tmp_path)
    before, began = _peak(), time.process_time()
    try:
        with LLM(folder, device="cpu", max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory=1 << 20) as llm:
            assert name == "max_position_embeddings"
            assert llm.engine.config.max_model_len < value
    except RidgelineError as error:
        words = str(error)
    else:
        words = f"the context of {value} has shrunk"
    assert any(reason in words for reason in (str(value), "config.json asks for", "config.json says"))
    assert time.process_time() - began < 5
    assert _peak() - before < 300e6


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _gguf(tmp_path: Path, **values: tuple[int, object]) -> Path:
    file = Gguf.whole()
    file.values |= {name.replace("__", "."): value for name, value in values.items()}
    path = tmp_path / "model.gguf"
    path.write_bytes(file.encoded())
    return path


@pytest.mark.parametrize("value", [(4, 0), (8, "wide"), (9, (4, [1, 2])), (6, 8.0), (7, True)], ids=str)
@pytest.mark.parametrize("name", ["attention.key_length", "rope.dimension_count", "embedding_length", "block_count"])
def test_a_gguf_value_we_calculate_with_is_a_whole_number(tmp_path: Path, name: str, value: tuple[int, object]) -> None:
    path = _gguf(tmp_path, **{f"llama__{name.replace('.', '__')}": value})
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        LLM(path, device="cpu")


def test_heads_of_an_odd_width_cannot_be_stored_in_pairs(tmp_path: Path) -> None:
    path = _gguf(tmp_path, llama__attention__key_length=(4, 255), llama__rope__dimension_count=(4, 8))
    with pytest.raises(ModelLoadError, match="heads of 255 dimensions"):
        LLM(path, device="cpu")


def test_a_gguf_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    path = _gguf(tmp_path)
    assert read_gguf(path) is read_gguf(path)
    path = _gguf(tmp_path, llama__context_length=(4, 128))
    os.utime(path, ns=(1, 1))
    assert read_gguf(path).values["llama.context_length"] == 128


def test_errors_are_one_printable_line() -> None:
    assert str(ModelLoadError("a\nb\x1b[31m\ud800")) == "a\\nb\\x1b[31m\\ud800"
    assert one_line("größe 你\u3000好 🎃") == "größe 你\u3000好 🎃"
    long = one_line("begin " + "x" * 10**6 + " end.")
    assert long.startswith("begin")
    assert long.endswith("end.")
    assert len(long) < 900


def test_json_files_are_bounded(tmp_path: Path) -> None:
    large = tmp_path / "config.json"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    os.mkfifo(tmp_path / "pipe.json")
    for path in (large, tmp_path / "pipe.json", tmp_path):
        with pytest.raises(ModelLoadError, match=path.name):
            read_json(path)


# ---- tokenizers that fail -------------------------------------------------------------------------------------------

PANICS = "a" * 40 + "b"  # for the pattern below: the regular expression gives up, and the library panics


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    """A model whose tokenizer panics on some texts."""
    spec = tokenizer_of("byte_fallback")
    spec["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+a+)+c"}, "behavior": "Isolated", "invert": False}
    return write(Case(LLAMA, "tokenizer.json", json.dumps(spec).encode()), tmp_path)


def test_a_tokenizer_that_panics_on_a_text_fails_that_request(fragile: Path) -> None:
    tokenizer = Tokenizer.from_folder(fragile)
    usual = tokenizer.encode("the quick brown fox")
    with pytest.raises(InvalidRequest, match="tokenizer cannot encode this text") as caught:
        tokenizer.encode(PANICS)
    assert caught.value.param == "prompt"
    assert tokenizer.encode("the quick brown fox") == usual
    with LLM(fragile, device="cpu", max_num_seqs=2, kv_cache_memory=1 << 20) as llm:
        with pytest.raises(InvalidRequest):
            llm.generate(PANICS, use_tqdm=False)
        assert llm.generate("fox", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_tokenizer_that_fails_on_what_was_written_ends_that_completion(
    fragile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the same batch go on."""
    failing = 77

    def decode(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        if failing in ids:
            raise InvalidRequest("the model's tokenizer fails on the tokens.")
        return whole(self, ids, skip_special_tokens)

    whole = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", decode)
    bias = SamplingParams(max_tokens=3, temperature=0, logit_bias={failing: 100.0})
    plain = SamplingParams(max_tokens=3, temperature=0, logit_bias={failing: -100.0})
    with LLM(fragile, device="cpu", max_num_seqs=2, kv_cache_memory=1 << 20) as llm:
        bad, good = (each.outputs[0] for each in llm.generate(["fox", "dog"], [bias, plain], use_tqdm=False))
        assert (bad.finish_reason, bad.error) == ("error", "the model's tokenizer fails on the tokens.")
        assert (good.finish_reason, len(good.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"post_processor": {"type": "Sequence", "processors": 5}}, "cannot be read"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAgAAAAA=="}}, "promises 2147483648 bytes"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}] * 12,
                }
            },
            "normalizer turns",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP//////////"}},
            "cannot be used",
        ),  # panics
    ],
)
def test_a_tokenizer_that_cannot_work_is_refused_at_load(tmp_path: Path, part: dict, sentence: str) -> None:
    spelled = json.dumps({**tokenizer_of("byte_fallback"), **part})
    for text in (spelled, spelled.replace("normalizer", "normal\\u0069zer")):
        folder = write(Case(LLAMA, "tokenizer.json", text.encode()), tmp_path)
        with pytest.raises(ModelLoadError, match=sentence):
            Tokenizer.from_folder(folder)


def test_replacements_of_real_tokenizers_are_let_through(tmp_path: Path) -> None:
    """Gemma's, T5's and XLM-R's are of this kind."""
    steps = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        {"type": "Prepend", "prepend": "▁"},
    ]
    spec = {**tokenizer_of("byte_fallback"), "normalizer": {"type": "Sequence", "normalizers": steps}}
    folder = write(Case(LLAMA, "tokenizer.json", json.dumps(spec).encode()), tmp_path)
    assert Tokenizer.from_folder(folder).encode("the fox")
