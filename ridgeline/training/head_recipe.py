"""The recipes of what drafts for a model: a head of EAGLE-3 or DFlash, heads of Medusa, or a smaller model trained
further."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import AttentionSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.tracking import UNTRACKED, Tracker
from ridgeline.training.block_heads import BlockHead, BlockShape
from ridgeline.training.card import PLOT, plot_loss
from ridgeline.training.drafted import acceptances, prompts, written
from ridgeline.training.embedded import EMBEDDED
from ridgeline.training.export import read_model, write_model
from ridgeline.training.head_card import head_card
from ridgeline.training.head_loop import HeadTraining, Trained, train_head
from ridgeline.training.heads import EagleHead, EagleShape, MedusaHeads
from ridgeline.training.joint import JointMedusa, export_target, nats_of
from ridgeline.training.learners import Block, DraftModel, Eagle, Learner, Medusa
from ridgeline.training.prepare import Prepared, prepare
from ridgeline.training.recipe import Report, device_name
from ridgeline.training.replicas import alone
from ridgeline.training.target import read_target
from ridgeline.training.tokenizer import SEPARATOR_ID
from ridgeline.training.traces import TextConfig, Traces, make_traces
from ridgeline.weights.folder import fingerprint
from ridgeline.weights.formats.json_file import read_json

Kind = Literal["eagle", "dflash", "medusa", "draft"]
Head = TypeVar("Head", EagleHead, BlockHead, MedusaHeads)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The settings of a run.

    kind: what is trained.
    target: the folder of the model that the drafts are for.
    start: the folder that is trained further; None begins a head anew.
    out: gets <name>/, <name>.jsonl and report.json.
    work: gets the corpus, texts and traces, and gives those that lie there.
    taps: the layers of the target that a head of EAGLE-3 or DFlash reads (default: low, middle and high ones).
    intermediate: the width of that head's feed-forwards.
    layers: those of a head of DFlash, whose blocks have a place for each pass of the training and one more.
    heads: how many heads of Medusa.
    joint: the target learns too (Medusa-2), and is written as <name>-target/.
    drafts: the tokens a step for which right drafts are counted.
    prompt, continuation, requests: the sizes of the evaluation, in tokens and in prompts of each held-out set.
    command, commit: go into the card.
    """

    kind: Kind
    target: Path
    start: Path | None
    out: Path
    work: Path
    device: torch.device
    training: HeadTraining
    text: TextConfig
    name: str = ""
    taps: tuple[int, ...] = ()
    intermediate: int = 768
    layers: int = 1
    heads: int = 4
    joint: bool = False
    batch_tokens: int = 2048
    max_train_bytes: int | None = None
    drafts: tuple[int, ...] = (4, 5)
    prompt: int = 256
    continuation: int = 64
    requests: int = 64
    seed: int = 0
    command: str = ""
    commit: str = ""
    tracker: Tracker = UNTRACKED


def run(config: HeadConfig, console: Console) -> Report:
    """Train, export and evaluate. Return what report.json holds: name → report."""
    alone("what drafts for a model is trained")
    started = time.monotonic()

    def say(what: str) -> None:
        console.print(f"[{time.monotonic() - started:5.0f} s] {what}", markup=False, highlight=False)

    target = read_target(config.target, config.device)
    config = replace(config, taps=_taps(config.taps, len(target.layers)))
    learner = make_learner(config, target)
    if config.joint:  # the first pass is the target's own
        config = replace(config, training=replace(config.training, passes=config.heads + 1))
    name = config.name or f"{config.target.name}-{config.kind}"
    for folder in (config.out, config.work):
        folder.mkdir(parents=True, exist_ok=True)
    say("reading packages, encoding")
    prepared = _prepare(config)
    tokens = hashlib.sha256(prepared.tokens.read_bytes()).hexdigest()
    groups = make_traces(
        target, prepared.tokens, config.text, config.taps, config.work, f"{fingerprint(config.target)}-{tokens}", say
    )
    traces = Traces(groups, batch_tokens=config.batch_tokens, seed=config.seed)
    report = _facts(name, config, learner, traces)
    if config.kind == "draft":
        report["before"] = _measure(config, learner, target, prepared, say)
    log = config.out / f"{name}.jsonl"
    trained = train_head(learner, traces, config.training, log, console, config.tracker)
    folder = config.out / name
    if isinstance(learner, JointMedusa):
        before, written_to = read_target(config.target, config.device), config.out / f"{name}-target"
        target = export_target(learner.target, written_to, config.target, prepared.tokenizer, config.device)
        report["target_nats"] = _change(config, before, target, prepared, say)
        learner, config = Medusa(learner.heads, target), replace(config, target=written_to)
    learner = _export(config, learner, target, folder, prepared)
    report |= _outcome(trained) | {"held_out": _measure(config, learner, target, prepared, say)}
    report["bytes"] = (folder / "model.safetensors").stat().st_size
    plot_loss(log, folder / PLOT, name, "loss_1")
    (folder / "README.md").write_text(head_card(report) + "\n")
    _write_report(config.out / "report.json", name, report)
    for file in (log, folder / PLOT, folder / "README.md", config.out / "report.json"):
        config.tracker.artifact(file)
    return {name: report}


def make_learner(config: HeadConfig, target: Decoder) -> Learner:
    """Return the learner to be trained. Raise InvalidConfig for sizes that do not go with the target."""
    spec, device = target.spec, config.device
    if config.kind == "draft":
        assert config.start is not None
        draft = read_target(config.start, device)
        if draft.spec.vocab_size != spec.vocab_size:
            raise InvalidConfig(
                f"{config.start} has {draft.spec.vocab_size:,} tokens and {config.target} {spec.vocab_size:,}; a draft "
                "model must have the target's vocabulary."
            )
        return DraftModel(draft.requires_grad_(True))
    if config.kind == "medusa":
        if config.training.passes != config.heads:
            raise InvalidConfig(f"{config.heads} heads of Medusa guess as many tokens, not {config.training.passes}.")
        heads = MedusaHeads(config.heads, spec.hidden_size, spec.vocab_size)
        begun = _begun(heads, config.start).to(device)
        return JointMedusa(begun, target.requires_grad_(True)) if config.joint else Medusa(begun, target)
    attention = spec.layers[-1].mixer
    assert isinstance(attention, AttentionSpec)  # read_target takes no others
    values = read_json(config.target / "config.json", required=True)
    shape: dict[str, Any] = {
        "hidden": spec.hidden_size,
        "intermediate": config.intermediate,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "taps": config.taps,
        "eps": float(values.get("rms_norm_eps", 1e-5)),
        "rope_theta": float(values.get("rope_theta", 10000.0)),
        "vocab": spec.vocab_size,
        "positions": spec.max_position_embeddings,
    }
    if config.kind == "dflash":
        shape |= {"layers": config.layers, "block": config.training.passes + 1, "mask": SEPARATOR_ID}
        head = BlockHead(BlockShape(**shape, target_layers=len(spec.layers)), config.seed)
        return Block(_begun(head, config.start).to(device), target)
    return Eagle(_begun(EagleHead(EagleShape(**shape), config.seed), config.start).to(device), target)


def _begun(head: Head, start: Path | None) -> Head:
    """Return the head with the weights of a folder, if there is one. Raise InvalidConfig if these have other shapes."""
    if start is None:
        return head
    stored = {name: tensor.float() for name, tensor in load_file(start / "model.safetensors").items()}
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (stored, head.state_dict())]
    if shapes[0] != shapes[1]:
        raise InvalidConfig(f"{start} holds a head of other sizes; give those that it was trained with.")
    head.load_state_dict(stored)
    return head


def _taps(given: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the layers to read. Raise InvalidConfig for some that the target lacks."""
    taps = given or tuple(sorted({min(1, layers - 1), layers // 2, max(0, layers - 2)}))
    if sorted(set(taps)) != list(taps) or not 0 <= taps[0] <= taps[-1] < layers:
        raise InvalidConfig(
            f"--taps must name layers of 0 to {layers - 1}, each once and in their order, got "
            f"{','.join(map(str, taps))}."
        )
    return taps


def _prepare(config: HeadConfig) -> Prepared:
    """Read the part of the embedded model's corpus that this machine has. Packages that are held out there are so here,
    or are not here at all."""
    installed = tuple(name for name in EMBEDDED.corpus.held_out_packages if _installed(name))
    return prepare(
        config.work,
        replace(EMBEDDED.corpus, held_out_packages=installed),
        vocab_size=EMBEDDED.vocab_size,
        tokenizer=config.target,
        seed=config.seed,
        max_train_bytes=config.max_train_bytes,
    )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _measure(
    config: HeadConfig, learner: Learner, target: Decoder, prepared: Prepared, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the results of drafts on each held-out set."""
    found = {}
    for name, texts in prepared.held_out.items():
        prompts_BS = prompts(
            prepared.tokenizer, texts, count=config.requests, length=config.prompt, seed=config.seed
        ).to(config.device)
        text_BS = written(target, prompts_BS, config.continuation, config.work, fingerprint(config.target))
        counts = [count for count in config.drafts if learner.most is None or count <= learner.most]
        each = [one.as_report() for one in acceptances(learner, target, text_BS, config.prompt, counts)]
        say(
            f"{name}: " + ", ".join(f"{a['tokens_per_step']:.2f} tokens a step with {a['drafts']} drafts" for a in each)
        )
        found[name] = each
    return found


def _change(
    config: HeadConfig, before: Decoder, after: Decoder, prepared: Prepared, say: Callable[[str], None]
) -> dict[str, tuple[float, float]]:
    """Return the target's loss on each held-out set before and after it learnt with the heads, in nats per token."""
    found = {}
    for name, texts in prepared.held_out.items():
        given = prompts(prepared.tokenizer, texts, count=config.requests, length=config.prompt, seed=config.seed)
        found[name] = nats_of(before, given.to(config.device)), nats_of(after, given.to(config.device))
        say(f"{name}: the target's loss was {found[name][0]:.4f} nats per token, and is {found[name][1]:.4f}")
    return found


def _export(config: HeadConfig, learner: Learner, target: Decoder, folder: Path, prepared: Prepared) -> Learner:
    """Write the folder, and return the learner with the rounded weights that lie there."""
    module = learner.module
    if isinstance(module, Decoder):
        assert config.start is not None
        write_model(folder, module, read_json(config.start / "config.json", required=True), prepared.tokenizer)
        return DraftModel(read_model(folder, config.device).float())
    assert isinstance(module, EagleHead | BlockHead | MedusaHeads)
    folder.mkdir(parents=True, exist_ok=True)
    about = module.config() if isinstance(module, MedusaHeads) else module.shape.config()
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return learner


def _facts(name: str, config: HeadConfig, learner: Learner, traces: Traces) -> Report:
    """Return the facts about the run that are known before it begins."""
    training = config.training
    return {
        "name": name,
        "kind": config.kind,
        "target": config.target.name,
        "start": None if config.start is None else config.start.name,
        "parameters": sum(p.numel() for p in learner.parts[0][0].parameters()),
        "taps": list(config.taps),
        "evaluation": {"prompt": config.prompt, "continuation": config.continuation, "requests": config.requests},
        "training": {
            "command": config.command,
            "commit": config.commit,
            "device": device_name(config.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "lr": training.lr,
            "betas": training.betas,
            "weight_decay": training.weight_decay,
            "clip": training.clip,
            "passes": training.passes,
            "decay": training.decay,
            "batch_tokens": config.batch_tokens,
            "tokens": traces.tokens,
            "own_tokens": config.text.own_rows * (config.text.own_length - config.text.own_length // 2),
            "temperatures": config.text.temperatures,
            "seed": config.seed,
        },
    }


def _outcome(trained: Trained) -> Report:
    return {
        "steps": trained.steps,
        "seconds": trained.seconds,
        "guesses": trained.guesses,
        "losses": list(trained.losses),
    }


def _write_report(file: Path, name: str, report: Report) -> None:
    """Add the report to those that the file holds."""
    others = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(others | {name: report}, indent=2) + "\n")
