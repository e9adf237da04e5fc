"""Heads that draft learn, are written as published ones, and are counted as a step by step decoding would."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training import head_recipe, prepare
from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.drafted import acceptances, walk
from ridgeline.training.embedded import EMBEDDED
from ridgeline.training.export import write_model
from ridgeline.training.head_loop import HeadTraining, train_head
from ridgeline.training.head_recipe import HeadConfig, Kind
from ridgeline.training.heads import EagleHead, EagleShape, MedusaHeads
from ridgeline.training.learners import DraftModel, Eagle, Learner, Medusa, right
from ridgeline.training.packages import Package, standard_library
from ridgeline.training.target import continued, read_target, traced
from ridgeline.training.traces import TextConfig, Traces
from tests import head_oracle
from tests.command import run_here
from tests.training.conftest import TEXTS, VOCAB

PASSES = 3
CPU = torch.device("cpu")
SHAPE = EagleShape(
    hidden=64,
    intermediate=96,
    heads=4,
    kv_heads=2,
    head_dim=32,
    taps=(0, 1),
    eps=1e-5,
    rope_theta=10000.0,
    vocab=VOCAB,
    positions=64,
)


@pytest.fixture
def folder(decoder: Decoder, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A target that is sure of what it writes, and does not write one token for ever."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1:
                spread = 0.4 if "embed" in name else 0.15
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    write_model(tmp_path / "target", decoder, config, tokenizer)
    return tmp_path / "target"


@pytest.fixture
def target(folder: Path) -> Decoder:
    return read_target(folder, CPU)


@pytest.fixture
def text(tokenizer: Tokenizer) -> torch.Tensor:
    return torch.tensor([tokenizer.encode("".join(TEXTS[i : i + 3])).ids[:40] for i in range(8)])


class Tapped(head_oracle.Eagle3):
    """The oracle's head, with the numbers of one of ours."""

    taps = SHAPE.taps

    def __init__(self, folder: Path, head: EagleHead) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        super().__init__(head_oracle.Target(model))
        assert {name: t.shape for name, t in self.tensors.items()} == {n: t.shape for n, t in head.state_dict().items()}
        self.tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}

    def states_of_model(self, tokens: list[int]) -> list[torch.Tensor]:
        """What transformers returns of the last layer is behind the final norm, so it is taken in front of it."""
        found: list[torch.Tensor] = []
        hook = self.target.model.model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        states = self.target.states(tokens)
        hook.remove()
        return [*states[:-1], found[0].reshape(states[-1].shape)]

    @torch.no_grad()
    def chain(self, tokens: list[int], start: int, passes: int) -> list[torch.Tensor]:
        """Return the scores of every pass of the chain that begins with pair `start`, over a text's own tokens."""
        features, found = self.features(self.states_of_model(tokens[: start + 1])), []
        for index in range(passes):
            known = tokens[1 : start + 2 + index]
            output = self.output(self.target.embedding[known], features)
            found.append(self.scores(output)[-1])
            features = torch.cat((features, output[-1:]))
        return found


def test_passes_over_a_whole_text_are_those_of_one_chain_after_the_other(
    folder: Path, target: Decoder, text: torch.Tensor
) -> None:
    head = EagleHead(SHAPE)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    oracle, starts = Tapped(folder, head), torch.tensor([0, 5, 6, 20])
    with torch.no_grad():
        ours = torch.stack(list(Eagle(head, target).scores(traced(target, text[:2], SHAPE.taps), starts, PASSES)))
    for row in range(2):
        for place, start in enumerate(starts.tolist()):
            theirs = torch.stack(oracle.chain(text[row].tolist(), start, PASSES))
            torch.testing.assert_close(ours[:, row, place], theirs, rtol=1e-3, atol=1e-3)  # float32, five layers


def test_a_head_of_medusa_adds_one_product_to_what_the_final_norm_returns(target: Decoder, text: torch.Tensor) -> None:
    heads = MedusaHeads(PASSES, 64, VOCAB)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    trace, starts, named = traced(target, text[:2]), torch.tensor([3, 9]), heads.state_dict()
    assert torch.equal(trace.likely_BSL[..., 0], target.scored(trace.normed_BSM.flatten(0, 1)).argmax(-1).view(2, -1))
    x = trace.normed_BSM[:, starts]
    for index, scores in enumerate(Medusa(heads, target).scores(trace, starts, PASSES)):
        y = x + F.silu(F.linear(x, named[f"{index}.0.linear.weight"], named[f"{index}.0.linear.bias"]))
        torch.testing.assert_close(scores, y @ target.embed.weight.T, rtol=1e-4, atol=1e-4)


def test_the_target_continues_as_without_a_cache(target: Decoder, text: torch.Tensor) -> None:
    known = text[:3, :9]
    for _ in range(12):
        known = torch.cat((known, traced(target, known).likely_BSL[:, -1:, 0]), 1)
    assert torch.equal(continued(target, text[:3, :9], 12), known)
    warm = [continued(target, text[:3, :9], 12, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(warm[0], warm[1])
    assert not torch.equal(warm[0], warm[2])


def learners(target: Decoder, folder: Path) -> dict[Kind, Learner]:
    return {
        "eagle": Eagle(EagleHead(SHAPE), target),
        "medusa": Medusa(MedusaHeads(PASSES, 64, VOCAB), target),
        "draft": DraftModel(read_target(folder, CPU).requires_grad_(True)),
    }


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft"])
def test_the_loss_falls_and_drafts_become_right(
    kind: Kind, target: Decoder, folder: Path, text: torch.Tensor, tmp_path: Path
) -> None:
    learner, passes = learners(target, folder)[kind], 1 if kind == "draft" else PASSES
    if kind == "draft":
        with torch.no_grad():
            for parameter in learner.module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    trace = traced(target, continued(target, text[:, :8], 32, temperature=1.0), learner.taps).stored()
    before = right(learner, target, trace.restored().tokens_BS, 1).float().mean()
    config = HeadTraining(lr=1e-2, passes=passes, steps=60, bf16=False, scored=0.5, alone=0.2)
    done = train_head(learner, Traces([trace], batch_tokens=160, seed=0), config, tmp_path / "log", Console(quiet=True))
    rows = [json.loads(row) for row in (tmp_path / "log").read_text().splitlines()]
    assert rows[-1]["step"] == done.steps == 60
    assert rows[-1]["loss_1"] < 0.5 * rows[0]["loss_1"]
    assert len(done.losses) == passes
    assert right(learner, target, trace.restored().tokens_BS, 1).float().mean() > before + 0.1


def test_right_drafts_are_counted_as_decoding_would(
    folder: Path, target: Decoder, text: torch.Tensor, tmp_path: Path
) -> None:
    learner = Eagle(EagleHead(SHAPE), target)
    written = continued(target, text[:4, :8], 32)
    config = HeadTraining(lr=1e-2, passes=PASSES, steps=40, bf16=False, scored=0.5)
    stored = traced(target, written, SHAPE.taps).stored()
    train_head(learner, Traces([stored], batch_tokens=160, seed=0), config, tmp_path / "log", Console(quiet=True))
    oracle, steps = Tapped(folder, learner.module), []
    for row in written.tolist():
        end, known = row.index(0, 8) if 0 in row[8:] else len(row), 8
        while known + PASSES + 1 < end:
            chain = oracle.chain(row, known - 1, PASSES)
            drafts = [int(scores.argmax()) for scores in chain]
            hits = [draft == token for draft, token in zip(drafts, row[known + 1 :], strict=False)]
            steps.append(([*hits, False]).index(False))
            known += steps[-1] + 1
    [found] = acceptances(learner, target, written, 8, [PASSES])
    assert (found.steps, found.tokens) == (len(steps), len(steps) + sum(steps))
    assert found.accepted[0] == pytest.approx(sum(run > 0 for run in steps) / len(steps))
    assert 0 < found.accepted[0] < 1


def test_the_target_is_always_right_about_itself(target: Decoder, text: torch.Tensor) -> None:
    [found] = acceptances(DraftModel(target), target, continued(target, text[:4, :8], 32), 8, [4])
    assert found.tokens_per_step == 5
    assert found.accepted == (1, 1, 1, 1)


def test_a_walk_goes_on_behind_what_was_accepted() -> None:
    assert walk([9, 9, 2, 9, 9, 0, 1, 9, 9, 9, 9], end=12, prompt=3, most=3) == [2, 0, 1]


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few modules of the standard library; hold one out."""
    wanted, library = ("queue.py", "heapq.py", "bisect.py", "json/decoder.py", "json/encoder.py"), standard_library()
    few = Package(
        name=library.name,
        version=library.version,
        licence=library.licence,
        files=tuple(file for file in library.files if file[0] in wanted),
    )
    monkeypatch.setattr(prepare, "standard_library", lambda: few)
    monkeypatch.setattr(prepare, "installed_packages", lambda: [])
    monkeypatch.setattr(head_recipe, "_installed", lambda name: False)
    corpus = CorpusConfig(held_out_modules=("json",))
    monkeypatch.setattr(head_recipe, "EMBEDDED", replace(EMBEDDED, corpus=corpus))


@pytest.fixture
def run(folder: Path, tmp_path: Path, few_files: None) -> Callable[..., Path]:
    def running(kind: Kind, **settings: Any) -> Path:
        training = HeadTraining(lr=1e-3, passes=1 if kind == "draft" else PASSES, steps=2)
        begin = settings.pop("begin", folder if kind == "draft" else None)
        config = HeadConfig(
            kind=kind,
            target=folder,
            start=begin,
            out=tmp_path / "out",
            work=tmp_path / "work",
            device=CPU,
            text=TextConfig(corpus_rows=3, corpus_length=64, own_rows=4, own_length=32),
            **{
                "training": training,
                "heads": PASSES,
                "drafts": (2, 3),
                "prompt": 16,
                "continuation": 20,
                "requests": 3,
                **settings,
            },
        )
        [name] = head_recipe.run(config, Console(quiet=True))
        return tmp_path / "out" / name

    return running


def test_a_head_of_eagle_is_written_as_published_and_drafts_in_the_engine(
    run: Callable[..., Path], folder: Path
) -> None:
    made = run("eagle", intermediate=48)
    assert {path.name for path in made.iterdir()} == {"README.md", "config.json", "loss.png", "model.safetensors"}
    config, stored = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        "fc.weight": [64, 128],
        **{f"midlayer.{name}.weight": [64] for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "midlayer.self_attn.q_proj.weight": [64, 128],
        "midlayer.self_attn.k_proj.weight": [32, 128],
        "midlayer.self_attn.v_proj.weight": [32, 128],
        "midlayer.self_attn.o_proj.weight": [64, 64],
        "midlayer.mlp.gate_proj.weight": [48, 64],
        "midlayer.mlp.up_proj.weight": [48, 64],
        "midlayer.mlp.down_proj.weight": [64, 48],
        "norm.weight": [64],
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    report = json.loads((made.parent / "report.json").read_text())["target-eagle"]
    [rows] = report["held_out"].values()
    assert [row["drafts"] for row in rows] == [2, 3]
    assert f"**{rows[0]['tokens_per_step']:.2f}**" in (made / "README.md").read_text()
    drafting = {"method": "eagle3", "model": made, "num_speculative_tokens": 3}
    ask = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    plain, drafted = (
        LLM(folder, device="cpu", dtype="float32", speculative_config=way).generate("def f(x):", ask)[0]
        for way in (None, drafting)
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_heads_of_medusa_are_written_as_published(run: Callable[..., Path]) -> None:
    made = run("medusa")
    config, stored = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    assert (config["model_type"], config["medusa_num_heads"], config["medusa_num_layers"]) == ("medusa", PASSES, 1)
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        f"{head}.0.linear.{part}": shape
        for head in range(PASSES)
        for part, shape in (("weight", [64, 64]), ("bias", [64]))
    }


def test_a_draft_model_is_measured_before_and_after(run: Callable[..., Path]) -> None:
    made = run("draft")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in made.iterdir()}
    card = (made / "README.md").read_text()
    assert card.count("tokens a step |") == 2
    assert "**4.00**" in card  # the target drafts for itself, three tokens


def test_a_head_goes_on_from_a_folder(run: Callable[..., Path], folder: Path) -> None:
    made = run("eagle", intermediate=48)
    before = load_file(made / "model.safetensors")
    again = run("eagle", intermediate=48, begin=made, name="again", training=HeadTraining(lr=1e-9, passes=2, steps=1))
    after = load_file(again / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "began as `target-eagle`" in (again / "README.md").read_text()
    with pytest.raises(InvalidConfig, match="other sizes"):
        run("eagle", intermediate=32, begin=made)


def test_texts_and_traces_are_made_once(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run("eagle", intermediate=48)
    monkeypatch.setattr("ridgeline.training.traces.continued", lambda *_, **__: pytest.fail("continued again"))
    monkeypatch.setattr("ridgeline.training.drafted.continued", lambda *_, **__: pytest.fail("continued again"))
    run("medusa")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"taps": (1, 0)}, "--taps"),
        ({"taps": (0, 7)}, "0 to 1"),
        ({"heads": 2, "kind": "medusa"}, "2 heads"),
        ({"text": TextConfig(corpus_rows=1, corpus_length=64, own_rows=0), "prompt": 10**6}, "no held-out file"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    run: Callable[..., Path], settings: dict[str, Any], word: str
) -> None:
    kind, extra = settings.get("kind", "eagle"), {k: v for k, v in settings.items() if k not in ("kind", "text")}
    with pytest.raises(InvalidConfig, match=word):
        run(kind, **extra)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["eagle"], "--minutes or --steps"),
        (["medusa", "--steps", "1", "--minutes", "1"], "--minutes or --steps"),
        (["eagle", "--steps", "1", "--taps", "low"], "low"),
        (["eagle", "--steps", "1", "--taps", "1,9"], "0 to 6"),
        (["draft", "--steps", "1", "--from", "/no/such"], "/no/such"),
        (["medusa", "--steps", "1", "--corpus-rows", "0", "--own-rows", "0"], "not both 0"),
        (["eagle", "--steps", "1", "--device", "cuda:99"], "cuda:99"),
    ],
)
def test_mistakes_on_the_command_line_give_one_sentence(arguments: list[str], word: str, tmp_path: Path) -> None:
    done = run_here("train", *arguments, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert word in done.stderr
    assert not (tmp_path / "out").exists()
