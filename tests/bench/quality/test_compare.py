"""What `eval compare` says of two models is what transformers' logits of both say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.quality.compare import compare
from ridgeline_bench.quality.documents import TextFile, read_file
from tests import tiny_models
from tests.bench.quality.conftest import TEXT

pytestmark = pytest.mark.usefixtures("forked_ranks")

BOS = 1
LETTERS = "abcdefghijklmnop"  # fewer than the logprobs a request may ask for: nothing is left to the rest
SMALL = len(LETTERS)


def changed(folder: Path, made: Path, *, by: float) -> Path:
    """A copy of the model whose weights are off by noise of this size."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((folder / name).read_bytes())
    return made


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(folder, tmp_path_factory.mktemp("other"), by=0.02)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 16 tokens, each a letter."""
    folder = tiny_models.save("llama", tmp_path_factory.mktemp("small"), vocab_size=SMALL)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "b", "eos_token": "c"}')
    return folder


@torch.inference_mode()
def full_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model(torch.tensor([[BOS, *ids]])).logits[0, :-1].double().log_softmax(-1)


def full_kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


def of(folder: Path) -> dict[str, Any]:
    return {"model": folder, "device": "cpu"}


def test_divergence_is_exact_where_all_tokens_are_named(small: Path, tmp_path: Path) -> None:
    other = changed(small, tmp_path, by=0.02)
    ids = torch.randint(SMALL, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    file = TextFile(Path("words"), (" ".join(LETTERS[i] for i in ids),))
    [found], _ = compare([file], of(small), of(other), window=255)
    p_NV, q_NV = full_logprobs(small, ids), full_logprobs(other, ids)
    kl_N = full_kl(p_NV, q_NV)
    # float32 logprobs of some nats, with errors around 1e-6; the divergence is a difference of their means.
    torch.testing.assert_close(torch.from_numpy(found.divergence.kl_N), kl_N, rtol=1e-3, atol=1e-5)
    said = found.divergence.as_dict()
    assert said["kl_mean"] == pytest.approx(kl_N.mean().item(), rel=1e-3)
    assert said["kl_p99"] == pytest.approx(kl_N.quantile(0.99).item(), rel=1e-3)
    assert said["covered"] == pytest.approx(1, abs=1e-5)
    assert said["equal_greedy"] == pytest.approx((p_NV.argmax(-1) == q_NV.argmax(-1)).double().mean().item())
    assert 0 < said["equal_greedy"] < 1


@pytest.mark.parametrize("top", [1, 5, 20])
def test_divergence_over_the_likeliest_is_that_with_all_others_as_one(folder: Path, other: Path, top: int) -> None:
    file = TextFile(Path("a.txt"), (TEXT,))
    [found], _ = compare([file], of(folder), of(other), window=255, top=top)
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    p_NV, q_NV = full_logprobs(folder, ids), full_logprobs(other, ids)
    for p_V, q_V, token, kl, covered in zip(
        p_NV, q_NV, ids, found.divergence.kl_N, found.divergence.covered_N, strict=True
    ):
        known = sorted({token} | set(p_V.topk(top).indices.tolist()) & set(q_V.topk(top).indices.tolist()))
        p = torch.cat([p_V[known].exp(), 1 - p_V[known].exp().sum(0, keepdim=True)])
        q = torch.cat([q_V[known].exp(), 1 - q_V[known].exp().sum(0, keepdim=True)])
        assert kl == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-2, abs=1e-5)
        assert covered == pytest.approx(p[:-1].sum().item(), abs=1e-5)
        assert kl <= full_kl(p_V, q_V).item() + 1e-5
    assert found.baseline.nats == pytest.approx(-p_NV.gather(1, torch.tensor(ids)[:, None]).sum().item(), rel=1e-5)
    assert found.candidate.nats == pytest.approx(-q_NV.gather(1, torch.tensor(ids)[:, None]).sum().item(), rel=1e-5)


def test_a_model_does_not_differ_from_itself_and_files_add_up(folder: Path) -> None:
    files = [TextFile(Path("a.txt"), (TEXT,)), TextFile(Path("b.txt"), (TEXT[:40], TEXT[40:90]))]
    found, records = compare(files, of(folder), {**of(folder), "max_num_batched_tokens": 32}, window=32, stride=8)
    assert [each.baseline.name for each in found] == ["a.txt", "b.txt", "together"]
    assert len(found[2].divergence.kl_N) == found[0].baseline.num_tokens + found[1].baseline.num_tokens
    for each in found:
        said = each.divergence.as_dict()
        assert said["kl_max"] < 1e-5  # other batches, so other roundings
        assert said["equal_greedy"] > 0.98
        assert each.candidate.perplexity == pytest.approx(each.baseline.perplexity, rel=1e-5)
    named = {record.workload for record in records}
    assert named == {
        f"quality:{f}:device=cpu>device=cpu,max_num_batched_tokens=32" for f in ("a.txt", "b.txt", "together")
    }
    assert {r.metric for r in records} >= {"perplexity", "perplexity_baseline", "kl_mean", "kl_p99", "equal_greedy"}


def test_models_that_cut_text_differently_are_not_compared(folder: Path, small: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the fox")
    with pytest.raises(InvalidConfig, match="different tokens"):
        compare([read_file(tmp_path / "a.txt")], of(folder), of(small))


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "a.txt").write_text(TEXT)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "ridgeline",
            "eval",
            "compare",
            str(tmp_path / "a.txt"),
            "--model",
            str(folder),
        ]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280, check=False)

    return call


def test_the_command_writes_where_and_how_it_was_measured(run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "quality.jsonl"
    done = run("--candidate", '{"dtype": "bfloat16"}', "--json", "--out", str(out), "--window", "64", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    [said] = json.loads(done.stdout)
    assert 0 < said["kl_mean"] < said["kl_p99"]
    records = {(line := json.loads(text))["metric"]: line for text in out.read_text().splitlines()}
    assert records["kl_mean"]["value"] == said["kl_mean"]
    assert records["perplexity"]["value"] == said["candidate"]["perplexity"]
    assert records["kl_mean"]["dtype"] == "bfloat16"
    assert records["kl_mean"]["options"]["candidate"]["dtype"] == "bfloat16"
    assert records["kl_mean"]["options"]["window"] == 64
    machine = records["kl_mean"]["machine"]
    assert (machine["torch"], bool(machine["cpu"]), "commit" in machine) == (torch.__version__, True, True)


@pytest.mark.parametrize(
    ("candidate", "sentence"), [('{"quant": 8}', "no argument quant"), ("int8", "must be a JSON object")]
)
def test_mistakes_end_with_one_sentence(run: Callable[..., Any], candidate: str, sentence: str) -> None:
    done = run("--candidate", candidate)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
