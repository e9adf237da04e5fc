"""A tiny model as ONNX: transformers, torch and ONNX Runtime agree about it, and what differs has no figure."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.perf.footprint import parameters
from ridgeline.weights.folder import shipped_model
from ridgeline.weights.loader import fill_dummy, read_model_config
from ridgeline_bench.scripts import onnx_export, onnx_page
from ridgeline_bench.scripts.experiments_page import stored
from ridgeline_bench.scripts.onnx_export import Work, fault, measured
from ridgeline_bench.scripts.onnx_network import CachedNetwork, check_exportable, empty_past, export, open_network
from ridgeline_bench.scripts.onnx_sessions import Session, Spoken, check_provider, needed, node_counts, passes
from ridgeline_bench.scripts.random_model import write

ASKED = Namespace(opsets=[23], levels=["none", "all"], providers="cpu", prompt=6, tokens=4, rounds=1, threads=1)


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model, with its ONNX files."""
    made = tmp_path_factory.mktemp("onnx") / "tiny"
    write(folder, made, layers=1, seed=0, device=torch.device("cpu"), router=0.05)
    return made


@pytest.fixture(scope="module")
def found(tiny: Path) -> list[dict[str, Any]]:
    """The lines of the whole command: exported, checked, timed."""
    return list(onnx_export.lines(tiny, tiny, ASKED))


@pytest.mark.dealt
def test_every_session_says_what_the_engine_says(found: list[dict[str, Any]], tiny: Path) -> None:
    engine, none, whole = found
    assert engine["weights_gb"] == 4 * parameters(read_model_config(tiny).spec).total / 1e9
    assert [line.get("level") for line in found] == [None, "none", "all"]
    assert all(line["first_ms"] > 0 and line["token_ms"] > 0 for line in found)
    assert max(none["error"], whole["error"]) <= onnx_export.TOLERANCE


def test_the_runtime_s_log_and_graphs_say_what_was_optimized(found: list[dict[str, Any]], tiny: Path) -> None:
    _, none, whole = found
    exported = node_counts(tiny / "opset23.onnx")
    assert none["nodes"] == exported
    assert exported["Attention"] == 1  # from opset 23 on it is one operator
    assert none["passes"] == []
    assert whole["tried"] > none["tried"]
    assert "QuickGeluFusion" in whole["passes"]
    assert whole["nodes"]["com.microsoft.QuickGelu"] == exported["Sigmoid"] == 1
    assert sum(whole["nodes"].values()) < sum(exported.values())


def test_greedy_tokens_and_logits_are_transformers(found: list[dict[str, Any]], tiny: Path) -> None:
    theirs, read = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), [5, 300, 17, 9]
    spoken = Session(file=tiny / "opset23.onnx", level="extended").speak(read, 3)
    want = theirs.generate(torch.tensor([read]), do_sample=False, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    assert spoken.tokens == want[0, len(read) :].tolist()
    with torch.no_grad():
        logits = theirs(want[:, :-1]).logits[0, len(read) - 1 :].numpy()
    assert np.abs(spoken.logits - logits).max() <= onnx_export.TOLERANCE * np.abs(logits).max()


@pytest.mark.usefixtures("found")
def test_sequences_tokens_and_the_cache_may_have_any_size(tiny: Path) -> None:
    session, network = onnxruntime.InferenceSession(str(tiny / "opset23.onnx")), open_network(tiny, 16)
    spec, generator = network.decoder.spec, torch.Generator().manual_seed(0)
    for batch, length, before in ((3, 2, 4), (1, 1, 7), (2, 5, 0)):
        past = [torch.randn(x.shape, generator=generator) for x in empty_past(spec, batch, before)]
        ids = torch.randint(spec.vocab_size, (batch, length), generator=generator)
        given = {each.name: x.numpy() for each, x in zip(session.get_inputs(), [ids, *past], strict=True)}
        for got, want in zip(session.run(None, given), network(ids, past), strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_at_a_time_is_the_whole_sequence(folder: Path, window: int | None) -> None:
    spec = read_model_config(folder).spec
    layers = tuple(replace(each, mixer=replace(each.mixer, window=window)) for each in spec.layers)  # type: ignore[type-var]
    network = network_of(replace(spec, layers=layers))
    ids = torch.tensor([[7, 300, 12, 45, 199, 3]])
    with torch.no_grad():
        hidden = network.decoder(ids[0], torch.arange(6), DenseCausal(1))
        want, past = network.decoder.logits(hidden), empty_past(spec, 1, 0)
        for n in range(6):
            got, *past = network(ids[:, n : n + 1], past)
            torch.testing.assert_close(got[0], want[n], rtol=1e-4, atol=1e-5)


def network_of(spec: ModelSpec) -> CachedNetwork:
    ops, cpu = Ops(Platform(device_type="cpu"), {"linear": "torch"}), torch.device("cpu")
    decoder = Decoder(spec, ops, dtype=torch.float32, device=cpu, max_positions=16)
    fill_dummy(decoder, 0)
    return CachedNetwork(decoder)


@pytest.mark.usefixtures("found")
def test_a_session_that_differs_has_no_figure(tiny: Path) -> None:
    session, work = Session(file=tiny / "opset23.onnx", threads=1), Work([1, 2, 3], 2, 1)
    spoken = session.speak(work.prompt, 2)
    right, other = spoken.tokens, [spoken.tokens[0], spoken.tokens[1] + 1]
    assert fault(spoken, right, spoken.logits) is None
    assert fault(spoken, other, spoken.logits) == f"token 1 is {right[1]}, and the engine's {other[1]}"
    off = spoken.logits + np.abs(spoken.logits).max() * 3e-4
    line = measured(session, work, right, off)
    assert "off by" in line["fault"]
    assert not {"token_ms", "first_ms", "error"} & line.keys()


def test_times_are_the_least_of_the_runs() -> None:
    runs = [[0.5, 0.1, 0.3, 0.2], [0.4, 0.6, 0.7, 0.8]]
    assert onnx_export.Figure.least(runs) == (400.0, 200.0)


def test_a_provider_that_is_not_there_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidConfig, match=r"needs TensorrtExecutionProvider, and this onnxruntime .* has .*CPU"):
        check_provider("tensorrt", onnxruntime)
    check_provider("cpu", onnxruntime)
    with pytest.raises(InvalidConfig, match=r"pip install 'ridgeline\[onnx\]'"):
        needed("onnx_that_is_not_there")


@pytest.mark.dealt
@pytest.mark.usefixtures("found")
def test_an_opset_that_the_exporter_does_not_reach_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="in opset 18 and cannot turn it into 7"):
        export(open_network(tiny, 16), tmp_path / "old.onnx", 7)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_the_cache_of_keys_does_not_describe_are_refused() -> None:
    mixture = shipped_model("embedded-moe")
    assert mixture is not None
    with pytest.raises(InvalidConfig, match="only dense feed-forwards"):
        check_exportable(read_model_config(mixture).spec)
    with pytest.raises(InvalidConfig, match="only causal attention"):
        check_exportable(read_model_config(onnx_page.SHAPES / "mamba2-2.7b").spec)
    spec = read_model_config(onnx_page.SHAPES / "llama-1b").spec
    capped = replace(spec.layers[0], mixer=replace(spec.layers[0].mixer, softcap=30.0))  # type: ignore[type-var]
    with pytest.raises(InvalidConfig, match="softcap"):
        check_exportable(replace(spec, layers=(capped,)))


def test_passes_are_read_from_the_log() -> None:
    log = "[I] GraphTransformer A modified: 0 with\n[I] GraphTransformer B modified: 1 with\n" * 2
    assert passes(log + "[I] GraphTransformer A modified: 1 with") == (["B", "A"], 2)


def test_ranges_of_shapes_for_tensorrt_name_every_input(found: list[dict[str, Any]], tiny: Path) -> None:
    ranges = Session(file=tiny / "opset23.onnx").shapes
    assert ranges["trt_profile_min_shapes"].split(",")[:2] == ["input_ids:1x1", "past_0_key:1x2x0x16"]
    assert all(each.count(":") == 3 for each in ranges.values())


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    text = onnx_page.PAGE.read_text(encoding="utf-8")
    assert onnx_page.page(text, stored(onnx_page.RESULTS)) == text


def test_bytes_of_8b_are_those_of_hand_arithmetic() -> None:
    line = {"opset": 23, "model": "some", "level": "all", "provider": "cpu", "weights_gb": 5.0, "token_ms": 500.0}
    [row] = [row for row in onnx_page.larger([line]) if row.startswith("| llama-8b")]
    # 32 layers of 4096 x 14336 with 8 of 32 heads for keys, two tables of 128,256 rows; 10 GB/s
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2)
    count = 32 * layer + 2 * 128_256 * 4096 + 4096
    cells = [count / 1e9, 4 * count / 1e9, 2 * count / 1e9, 2 * 32 * 8 * 128 * 4 / 1e6, 4 * count / 1e7]
    want = ["llama-8b", *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (2, 1, 1, 3, 0), strict=True))]
    assert row == f"| {' | '.join(want)} |"


def test_a_fault_names_the_error() -> None:
    logits = np.array([[1.0, 2.0]])
    spoken = Spoken(tokens=[1], seconds=[1.0], logits=logits + 1e-3)
    assert fault(spoken, [1], logits) == "a logit is off by 5.0e-04 of the largest, above 1e-04"
