"""The embedded model's recipe: its sizes, and one whole run on a few files."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ridgeline.cli import app, train
from ridgeline.cli.tracked import TrackFlags, tracked
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.models import ARCHITECTURES, model_config
from ridgeline.training import embedded, linear, mixture, prepare, recipe
from ridgeline.training.corpus import CorpusConfig
from ridgeline.training.objective import training_decoder
from ridgeline.training.packages import Package, standard_library
from ridgeline.weights.folder import EMBEDDED_MODEL

MODEL_FILES = {
    *("README.md", "config.json", "generation_config.json", "loss.png"),
    *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
}

HELD_OUT = ("json/scanner.py", "json/tool.py")  # short: scoring them takes most of the time


def meta(of: recipe.ModelRecipe) -> Decoder:
    return training_decoder(model_config(of.config).spec, torch.bfloat16, torch.device("meta"))


def parameters(of: recipe.ModelRecipe) -> int:
    return sum(p.numel() for p in meta(of).parameters())


def test_the_embedded_model_fits_16_mb_and_its_draft_is_a_tenth() -> None:
    large, small = map(parameters, embedded.EMBEDDED.models)
    assert large < 8.0e6
    assert small / large == pytest.approx(0.1, abs=0.01)


def test_mixtures_differ_in_their_routers_alone() -> None:
    known = [of for of in mixture.MIXTURE.models if of.config["architectures"][0] in ARCHITECTURES]
    shapes = [
        {name: p.shape for name, p in meta(of).named_parameters() if not name.endswith("correction")} for of in known
    ]
    assert len(known) >= 2
    assert all(shape == shapes[0] for shape in shapes)
    assert parameters(known[0]) < 2.5e6


@pytest.mark.parametrize(
    ("device", "flags", "compiled"),
    [
        ("cpu", [], False), ("cuda", [], True), ("cuda:1", [], True),
        ("cuda", ["--no-compile"], False), ("cpu", ["--compile"], True),
    ],
)  # fmt: skip
def test_steps_are_compiled_on_a_gpu_unless_a_flag_says_otherwise(
    device: str, flags: list[str], compiled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[recipe.RecipeConfig] = []
    monkeypatch.setattr(recipe, "run", lambda config, console: configs.append(config))
    monkeypatch.setattr(train, "device_of", torch.device)  # which would ask whether this machine has one
    app(
        ["train", "pretrain", "--out", str(tmp_path), "--steps", "1", "--device", device, *flags], standalone_mode=False
    )
    assert [(config.device, config.compile) for config in configs] == [(torch.device(device), compiled)]


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> CorpusConfig:
    """Train on a few modules of the standard library; hold one out."""
    wanted = ("queue.py", "heapq.py", "bisect.py", "shlex.py", "textwrap.py", *HELD_OUT)
    library = standard_library()
    few = Package(
        name=library.name,
        version=library.version,
        licence=library.licence,
        files=tuple(file for file in library.files if file[0] in wanted),
    )
    monkeypatch.setattr(prepare, "standard_library", lambda: few)
    monkeypatch.setattr(prepare, "installed_packages", lambda: [])
    return CorpusConfig(held_out_modules=("json",))


def test_one_run_makes_a_model_folder_a_log_and_a_report(tmp_path: Path, few_files: CorpusConfig) -> None:
    tiny = embedded.llama_config(hidden=64, intermediate=64, layers=1, heads=1, kv_heads=1)
    model = recipe.ModelRecipe(name="tiny", purpose="A test.", config=tiny, lr=1e-3, share=1.0)
    config = recipe.RecipeConfig(
        recipe=replace(embedded.EMBEDDED, models=(model,), corpus=few_files),
        out=tmp_path / "out",
        work=tmp_path / "work",
        device=torch.device("cpu"),
        steps=2,
        batch_tokens=2048,
    )
    with tracked(TrackFlags("jsonl", tmp_path / "runs"), "train") as tracker:
        recipe.run(replace(config, tracker=tracker), Console(quiet=True))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tiny.tar", "tiny.jsonl", "report.json"}
    [kept] = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (kept / "run.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "out" / "tiny.jsonl").read_text().splitlines()]
    losses = [(e["step"], e["values"]["tiny/loss"]) for e in events if "tiny/loss" in e.get("values", {})]
    assert losses == [(row["step"], row["loss"]) for row in rows]
    assert {path.name for path in (kept / "artifacts").iterdir()} == {"tiny.tar", "tiny.jsonl", "report.json"}
    with tarfile.open(tmp_path / "out" / "tiny.tar") as tar:
        assert set(tar.getnames()) == {"tiny", *(f"tiny/{name}" for name in MODEL_FILES)}
        card = tar.extractfile("tiny/README.md").read().decode()  # type: ignore[union-attr]
    report = json.loads((tmp_path / "out" / "report.json").read_text())["tiny"]
    score = report["held_out"]["standard library"]
    assert score["bytes"] == sum(len(path.read_bytes()) for name, path in standard_library().files if name in HELD_OUT)
    assert f"**{score['bits_per_byte']:.3f}**" in card
    assert "| python |" in card
    assert "license: apache-2.0" in card


def test_a_model_trained_further_starts_from_its_weights_and_is_scored_rounded(
    tmp_path: Path, few_files: CorpusConfig
) -> None:
    base = replace(embedded.EMBEDDED, corpus=few_files, context=256, stride=128)
    draft = EMBEDDED_MODEL.with_name("embedded-draft")
    plain = recipe.continued(base, draft, lr=1e-9)  # so that what comes out is what went in
    scores = {}
    for name, made in {"plain": plain, "rounded": recipe.quantized(plain, "w2a16", 64)}.items():
        config = recipe.RecipeConfig(
            recipe=made,
            out=tmp_path / name,
            work=tmp_path / name / "work",
            device=torch.device("cpu"),
            steps=1,
            batch_tokens=256,
            max_held_out_bytes=4000,
        )
        [report] = recipe.run(config, Console(quiet=True)).values()
        scores[name] = report["held_out"]["standard library"]["bits_per_byte"]
    assert scores["plain"] < 2.5 < scores["rounded"]
    folder = tmp_path / "rounded" / "work" / "models" / "embedded-draft-w2a16"
    before, after = load_file(draft / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], before[name], rtol=2**-7, atol=1e-6) for name in before)
    assert "rounded to w2a16" in (folder / "README.md").read_text()


def test_a_recipe_of_mixtures_says_how_busy_their_experts_are(tmp_path: Path, few_files: CorpusConfig) -> None:
    config = recipe.RecipeConfig(
        recipe=replace(mixture.MIXTURE, models=mixture.MIXTURE.models[:2], corpus=few_files),
        out=tmp_path / "out",
        work=tmp_path / "work",
        device=torch.device("cpu"),
        steps=1,
        batch_tokens=1024,
        max_held_out_bytes=4000,
    )
    reports = mixture.run(config, Console(quiet=True))
    assert (tmp_path / "out" / mixture.PLOT).stat().st_size > 10_000
    for name, report in reports.items():
        figures = report["experts"]
        assert all(sum(layer) == pytest.approx(1, abs=1e-5) for layer in figures["share"])
        card = (tmp_path / "work" / "models" / name / "README.md").read_text()
        assert f"**{figures['load_entropy']:.3f}** bits of 4.000" in card
        assert "Qwen3-MoE" in card
        row = json.loads((tmp_path / "out" / f"{name}.jsonl").read_text())
        assert 1 <= row["max_over_mean"] <= mixture.EXPERTS / mixture.USED
    ours = (tmp_path / "work" / "models" / "moe-none" / "tokenizer.json").read_bytes()
    assert ours == (EMBEDDED_MODEL / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"), [("GLA", "linear_attention"), ("RETNET", "linear_attention"), ("MAMBA2", "mamba2")]
)
def test_recipes_without_attention_lower_the_loss(
    name: str, kind: str, tmp_path: Path, few_files: CorpusConfig
) -> None:
    """The recipes' own widths and learning rates, in two layers and shorter sequences. A row of the log is the mean of
    ten steps."""
    wanted: recipe.Recipe = getattr(linear, name)
    short = replace(wanted.models[0], config={**wanted.models[0].config, "num_hidden_layers": 2})
    config = recipe.RecipeConfig(
        recipe=replace(wanted, models=(short,), corpus=few_files, context=64, stride=32),
        out=tmp_path / "out",
        work=tmp_path / "work",
        device=torch.device("cpu"),
        steps=20,
        batch_tokens=256,
        max_held_out_bytes=1000,
    )
    assert list(recipe.run(config, Console(quiet=True))) == [name.lower()]
    log = (tmp_path / "out" / f"{name.lower()}.jsonl").read_text()
    first, last = (json.loads(line)["loss"] for line in log.splitlines())
    assert last < first - 0.3
    mixer = model_config(wanted.models[0].config).spec.layers[0].mixer
    assert mixer.kind == kind
    assert wanted.models[1].name == "attention"
    assert f"{name.lower()}\n" in (tmp_path / "work" / "models" / name.lower() / "README.md").read_text()
    assert parameters(wanted.models[0]) == pytest.approx(parameters(wanted.models[1]), rel=0.05)


def test_a_step_must_hold_a_sequence(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="at least one sequence"):
        recipe.RecipeConfig(
            recipe=embedded.EMBEDDED,
            out=tmp_path,
            work=tmp_path,
            device=torch.device("cpu"),
            steps=1,
            batch_tokens=100,
        )
