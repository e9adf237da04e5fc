"""Perplexity and bits per byte equal transformers' sliding-window loss, and the training side's own count."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.training.evaluate import bits_per_byte
from ridgeline.training.export import read_model
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.quality.documents import TextFile, read_file
from ridgeline_bench.quality.likelihood import Cut, EvaluationFailed
from ridgeline_bench.quality.perplexity import Reading, TextScore, perplexity
from tests import tiny_models
from tests.api.conftest import write_tokenizer
from tests.bench.quality.conftest import TEXT

pytestmark = pytest.mark.usefixtures("forked_ranks")

BOS = 1
CODE = Path(__file__).read_text()


def score(llm: LLM, *documents: str, window: int = 32, stride: int = 8) -> TextScore:
    return perplexity(llm, Reading.of(llm, TextFile(Path("a.txt"), documents), Cut(window, stride)))


@torch.inference_mode()
def sliding_window_nats(model: transformers.PreTrainedModel, ids: list[int], window: int, stride: int) -> float:
    """As transformers' guide to the perplexity of fixed-length models has it, but the loss is summed, and the last
    window is as long as the others."""
    total, scored_to, end = 0.0, 1, 0
    while end < len(ids):
        end = min(len(ids), end + stride if end else window)
        tokens = torch.tensor([ids[max(0, end - window) : end]])
        labels = tokens.clone()
        labels[:, : scored_to - end] = -100
        total += float(model(tokens, labels=labels).loss) * (end - scored_to)  # the model shifts the labels itself
        scored_to = end
    return total


@pytest.mark.parametrize(("window", "stride"), [(32, 8), (32, 31), (17, 1), (255, 100)])
def test_perplexity_is_transformers_sliding_window_loss(
    llm: LLM, theirs: transformers.PreTrainedModel, window: int, stride: int
) -> None:
    ids = llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    found = score(llm, TEXT, window=window, stride=stride)
    expected = sliding_window_nats(theirs, [BOS, *ids], window, stride)
    # float32 throughout: some hundred log-probabilities, each of sums of 64 to 112 products.
    assert found.nats == pytest.approx(expected, rel=1e-5)
    assert (found.num_tokens, found.num_bytes, found.exact) == (len(ids), len(TEXT.encode()), True)
    assert found.perplexity == pytest.approx(math.exp(expected / len(ids)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_bits_per_byte_are_those_of_the_training_side() -> None:
    decoder = read_model(EMBEDDED_MODEL, torch.device("cpu")).float()
    texts = [CODE[:1500], CODE[1500:1900]]
    with LLM(dtype="float32", device="cpu") as llm:
        found = score(llm, *texts, window=129, stride=64)
        # There a window is counted in inputs; the last target comes on top.
        trained = bits_per_byte(decoder, llm.get_tokenizer().backend, texts, window=128, stride=64)
    assert found.num_tokens == trained.num_tokens
    assert found.bits_per_byte == pytest.approx(trained.bits_per_byte, rel=1e-5)  # float32, sums of up to 768 products


def test_neither_batching_nor_order_changes_the_score(llm: LLM, folder: Path) -> None:
    documents = [TEXT, TEXT[:50], TEXT[7:150], "fox"]
    found = score(llm, *documents)
    assert score(llm, *reversed(documents)).nats == pytest.approx(found.nats, rel=1e-6)
    with LLM(folder, device="cpu", max_num_seqs=1, max_num_batched_tokens=5) as one_by_one:
        assert score(one_by_one, *documents).nats == pytest.approx(found.nats, rel=1e-6)
    assert score(llm, *documents).nats == found.nats  # the same run gives the same bits


def test_documents_are_not_context_for_each_other(llm: LLM) -> None:
    parts = [score(llm, TEXT[:40]), score(llm, TEXT[40:90])]
    together = TextScore.together(parts)
    found = score(llm, TEXT[:40], TEXT[40:90])
    assert found.nats == pytest.approx(together.nats, rel=1e-6)
    assert (found.num_documents, found.num_tokens) == (2, together.num_tokens)
    assert found.nats != pytest.approx(score(llm, TEXT[:90]).nats, rel=1e-3)


def test_a_json_lines_file_is_its_documents(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one\\u2028 é"}\n\n{"text": "two", "other": 1}\n{"text": ""}\n')
    assert read_file(lines).documents == ("one\u2028 é", "two")
    assert read_file(lines).num_bytes == 9 + 3
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"one\r\ntwo")
    assert read_file(plain).documents == ("one\r\ntwo",)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff", "not valid UTF-8 .byte 0"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "a"}', "a.jsonl:2 has no field `text`"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1 is not a JSON object"),
        ("a.jsonl", b"[1]", "a.jsonl:1 is not a JSON object"),
        ("a.jsonl", b"{", "a.jsonl:1 is not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1 is not a JSON object"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidConfig, match=sentence):
        read_file(tmp_path / name)


@pytest.mark.parametrize(("window", "stride"), [(1, None), (256, None), (32, 32), (32, 0)])
def test_windows_the_model_cannot_read_are_refused(llm: LLM, window: int, stride: int | None) -> None:
    with pytest.raises(InvalidConfig, match=r"must be at least|context allows 2 to 255"):
        Cut.of(llm, window, stride)


def test_the_window_is_by_default_what_the_context_holds(llm: LLM) -> None:
    assert Cut.of(llm) == Cut(255, 127)


def test_texts_without_tokens_are_refused(llm: LLM) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    with pytest.raises(InvalidConfig, match=r"no tokens in blank\.txt"):
        Reading(TextFile(Path("blank.txt"), ("  \n",)), Tokenizer(tokenizer, {}), BOS, Cut.of(llm))


def test_a_tokenizer_that_loses_text_is_told_of(llm: LLM) -> None:
    lossy = tokenizers.Tokenizer.from_str(llm.get_tokenizer().backend.to_str())
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    files = [TextFile(Path("a.txt"), (text,)) for text in ("The fox", "the fox")]
    assert [Reading(file, Tokenizer(lossy, {}), BOS, Cut.of(llm)).exact for file in files] == [False, True]


def test_a_model_without_numbers_gets_no_score(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as damaged, pytest.raises(EvaluationFailed, match="not numbers"):
        score(damaged, TEXT)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", "eval", "perplexity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_the_command_reports_each_file_and_all_together(folder: Path, llm: LLM, tmp_path: Path) -> None:
    first, second, out = tmp_path / "first.txt", tmp_path / "second.jsonl", tmp_path / "new" / "results.jsonl"
    first.write_text(TEXT)
    second.write_text(json.dumps({"text": TEXT[:40]}) + "\n" + json.dumps({"text": TEXT[40:]}))
    done = run(
        first, second, "--model", folder, "--window", 32, "--stride", 8, "--device", "cpu", "--json", "--out", out
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [file["file"] for file in told["files"]] == [str(first), str(second)]
    expected = [score(llm, TEXT), score(llm, TEXT[:40], TEXT[40:])]
    assert [file["bits_per_byte"] for file in told["files"]] == pytest.approx([s.bits_per_byte for s in expected])
    assert told["together"]["perplexity"] == pytest.approx(TextScore.together(expected).perplexity)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["workload"], r["metric"]) for r in records} >= {
        ("perplexity:first.txt", "bits_per_byte"),
        ("perplexity:second.jsonl", "perplexity"),
        ("perplexity:together", "bits_per_byte"),
    }
    assert all(r["machine"]["torch"] == torch.__version__ and r["options"]["window"] == 32 for r in records)


def test_mistakes_end_with_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path / "missing.txt")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "missing.txt cannot be read" in done.stderr
