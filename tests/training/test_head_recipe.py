"""The commands that train heads: what they write is as published and runs in the engine, and mistakes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.training import head_recipe, prepare
from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.embedded import EMBEDDED
from ridgeline.training.head_loop import HeadTraining
from ridgeline.training.head_recipe import HeadConfig, Kind
from ridgeline.training.packages import Package, standard_library
from ridgeline.training.traces import TextConfig
from tests.command import run_here

PASSES = 3


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
            device=torch.device("cpu"),
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
    drafts_as_plain(folder, {"method": "eagle3", "model": made, "num_speculative_tokens": 3})


def drafts_as_plain(folder: Path, drafting: dict[str, Any]) -> None:
    """Check that the engine writes the same text with drafts and without."""
    ask = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    plain, drafted = (
        LLM(folder, device="cpu", dtype="float32", speculative_config=way).generate("def f(x):", ask)[0]
        for way in (None, drafting)
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_head_of_dflash_is_written_as_published_and_drafts_in_the_engine(
    run: Callable[..., Path], folder: Path
) -> None:
    made = run("dflash", intermediate=48, layers=2)
    config, stored = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": 0}
    assert config["block_size"] == PASSES + 1
    layer = {
        **{f"{name}.weight": [64] for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"self_attn.{name}_norm.weight": [32] for name in "qk"},
        "self_attn.q_proj.weight": [64, 64],
        "self_attn.k_proj.weight": [32, 64],
        "self_attn.v_proj.weight": [32, 64],
        "self_attn.o_proj.weight": [64, 64],
        "mlp.gate_proj.weight": [48, 64],
        "mlp.up_proj.weight": [48, 64],
        "mlp.down_proj.weight": [64, 48],
    }
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        **{f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()},
        "fc.weight": [64, 128],
        **{f"{name}.weight": [64] for name in ("hidden_norm", "norm")},
        "mask_embedding": [64],
    }
    assert "DFlash" in (made / "README.md").read_text()
    drafts_as_plain(folder, {"method": "dflash", "model": made, "num_speculative_tokens": PASSES})


def test_heads_and_target_that_learnt_together_draft_for_each_other(run: Callable[..., Path], folder: Path) -> None:
    training = HeadTraining(lr=2e-3, passes=PASSES, steps=6, bf16=False)
    made = run("medusa", joint=True, training=training)
    tuned = made.parent / f"{made.name}-target"
    before, after = (load_file(each / "model.safetensors") for each in (folder, tuned))
    moved = {name: float((after[name].float() - before[name].float()).abs().max()) for name in before}
    assert sum(change > 0 for change in moved.values()) > len(moved) / 2
    assert max(moved.values()) < 0.02  # six steps of a quarter of the heads' rate
    report = json.loads((made.parent / "report.json").read_text())["target-medusa"]
    assert len(report["losses"]) == PASSES + 1
    assert report["losses"][0] < report["losses"][1]  # the target's own divergence from what it was
    [(was, now)] = report["target_nats"].values()
    assert now == pytest.approx(was, rel=0.05)
    assert "Medusa-2" in (made / "README.md").read_text()
    drafts_as_plain(tuned, {"method": "medusa", "model": made, "num_speculative_tokens": PASSES})


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
        (["dflash", "--steps", "1", "--taps", "7"], "0 to 6"),
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
