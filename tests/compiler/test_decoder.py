"""Decoders of ours, compiled layer by layer: the scores stay, equal layers are one program, and others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.compiler import mlir
from ridgeline.compiler.decoder import LayerPrograms, check_compiled, compile_layers
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.weights.folder import shipped_model
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts.onnx_network import Caches, empty_past
from ridgeline_bench.scripts.stack.starts import WholeScores, scores_of, spec_of

if why := mlir.available():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("llvmlite")

POSITIONS = torch.arange(6)
IDS = POSITIONS * 31 % 300


def compiled(spec: ModelSpec, programs: LayerPrograms) -> tuple[WholeScores, torch.Tensor]:
    """A decoder with compiled layers, and the scores that it had before."""
    scores = scores_of(spec)
    with torch.no_grad():
        want = scores(IDS, POSITIONS)
    compile_layers(scores.decoder, programs)
    return scores, want


@torch.no_grad()
def test_equal_layers_are_one_program_and_the_scores_stay() -> None:
    programs = LayerPrograms()
    scores, want = compiled(spec_of(6, 64), programs)
    torch.testing.assert_close(scores(IDS, POSITIONS), want, rtol=1e-4, atol=1e-5)
    assert len(programs.made) == 2  # the first layer has no residual yet
    assert all(each.program.num_kernels == 3 for each in programs.made.values())
    other, want = compiled(spec_of(9, 64), programs)  # another decoder of the same layers compiles nothing
    other.decoder.layers[3].layer.mixer_norm.weight.fill_(0.5)
    assert not torch.allclose(other(IDS, POSITIONS), want)  # and has its own weights
    assert len(programs.made) == 2


@torch.no_grad()
def test_layers_of_different_specs_are_different_programs() -> None:
    spec = spec_of(4, 64)
    layers = tuple(
        replace(each, mixer=replace(each.mixer, window=3)) if at % 2 else each  # type: ignore[type-var]
        for at, each in enumerate(spec.layers)
    )
    programs = LayerPrograms()
    scores, want = compiled(replace(spec, layers=layers), programs)
    torch.testing.assert_close(scores(IDS, POSITIONS), want, rtol=1e-4, atol=1e-5)
    assert len(programs.made) == 3


@torch.no_grad()
def test_a_cache_stays_the_layer_s_own_and_other_lengths_get_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then a token at a time; where no more programs are kept, layers run as they are."""
    spec = spec_of(3, 64)
    monkeypatch.setattr("ridgeline.compiler.decoder.MOST_SHAPES", 4)
    programs = LayerPrograms()
    scores, want = compiled(spec, programs)
    past = empty_past(spec, 1, 0)
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        caches = Caches(past, end - begin)
        hidden = scores.decoder(IDS[begin:end], POSITIONS[begin:end], caches)
        past = list(caches.present)
        torch.testing.assert_close(scores.decoder.logits(hidden), want[begin:end], rtol=1e-4, atol=1e-5)
    assert len(programs.made) == 4


def test_layers_that_are_not_compiled_are_named() -> None:
    mixture = shipped_model("embedded-moe")
    assert mixture is not None
    spec = read_model_config(mixture).spec
    with pytest.raises(InvalidConfig, match=r"this one has \['attention', 'experts'\]"):
        compile_layers(scores_of(spec).decoder, LayerPrograms())
    mamba = read_model_config(Path(__file__).parents[2] / "benchmarks" / "models" / "mamba2-2.7b").spec
    with pytest.raises(InvalidConfig, match="attention and a dense feed-forward are compiled"):
        check_compiled(mamba.layers[0])
    scores, _ = compiled(spec_of(1, 64), LayerPrograms())
    with pytest.raises(InvalidConfig, match="it may be compiled already"):
        compile_layers(scores.decoder, LayerPrograms())
