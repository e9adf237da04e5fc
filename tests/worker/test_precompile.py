"""Kernels are compiled by other processes, once for every engine that needs others, and never in an engine's way."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline.core.settings.speculation import Speculation, speculation_of
from ridgeline.core.specs.draft_head import DraftHeadSpec, HeadSpec, MedusaSpec
from ridgeline.core.specs.model import ABSENT, ModelSpec
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.spec import foreign_config
from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import Fp8Format, Held, HeldMatrix
from ridgeline.kernels.ops import Ops
from ridgeline.models import model_config
from ridgeline.weights.folder import EMBEDDED_DRAFT, EMBEDDED_MODEL
from ridgeline.weights.loader import read_model_config
from ridgeline.worker import early, precompile
from ridgeline.worker.compilers import Compilers, processes_needed
from ridgeline.worker.precompile import KernelSet

pytest.importorskip("triton")
from tests.foreign_models import cut
from tests.models.latent_configs import DEEPSEEK_V2_LITE
from tests.models.whisper_configs import EVERY

FALCON_MAMBA = Path(__file__).parents[1] / "perf/configs/falcon-mamba-7b.json"
HELD = HeldMatrix(helds=(Held(format=Fp8Format()),) * 3, rows=(128, 64, 64), inputs=128)
KERNELS = KernelSet(
    spec=read_model_config(EMBEDDED_MODEL).spec,
    arch="sm_90",
    multiprocessors=132,
    dtype="bfloat16",
    max_model_len=64,
    max_seqs=2,
    max_tokens=16,
    block_size=64,
    cascade=True,
    speculation=speculation_of({"method": "ngram", "num_speculative_tokens": 3}),
)
NAMES = """
import json, pickle, sys, traceback
from ridgeline.worker import precompile
really, cases = precompile.compiling_for, pickle.load(sys.stdin.buffer)
precompile.compiling_for = lambda arch, multiprocessors, wanted: really(arch, multiprocessors, names.append)
for line in sys.stdin.buffer:
    names, failure = [], None
    try:
        precompile.compile_claimed(cases[json.loads(line)], None)
    except Exception:
        failure = traceback.format_exc()
    print(json.dumps(["\\n".join(names), failure]), flush=True)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSet:
    """Of a small engine on a GPU that is not here, with an empty cache, on a machine with cores to spare."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_ALWAYS_COMPILE", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    (tmp_path / "cache").mkdir()
    return replace(KERNELS)  # its marker is found anew


NamesOf = Callable[[str], str]


@pytest.fixture(scope="module")
def names_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamesOf]:
    """`names_of(case)`: the names of what would be compiled, one a line. One process finds those of all cases that are
    asked for, and compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("names"))
    command = [sys.executable, "-c", NAMES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None
        pickle.dump(cases(), asked)

        @cache
        def names(case: str) -> str:
            asked.write(json.dumps(case).encode() + b"\n")
            asked.flush()
            found, failure = json.loads(told.readline())
            assert failure is None, failure
            return str(found)

        yield names
        process.kill()


def cases() -> dict[str, KernelSet]:
    falcon_mamba = model_config(json.loads(FALCON_MAMBA.read_text())).spec
    latents = model_config(DEEPSEEK_V2_LITE).spec
    found = {
        "many kernels": replace(KERNELS, max_seqs=16, max_tokens=256),
        "no feed-forwards": replace(
            KERNELS, spec=replace(falcon_mamba, layers=falcon_mamba.layers[:2]), speculation=None
        ),
        "latents": replace(
            KERNELS,
            spec=replace(latents, layers=latents.layers[:2]),
            speculation=None,
            max_tokens=256,
            max_model_len=512,
        ),
        "sounds": replace(
            KERNELS,
            spec=model_config(EVERY["openai/whisper-tiny"]).spec,
            speculation=None,
            max_tokens=6000,
            max_model_len=448,
        ),
        **{name: replace(KERNELS, **changes) for name, (changes, _) in QUANTIZED.items()},
    }
    found |= {f"modules of transformers, {how}": kernels for how, kernels in of_transformers().items()}
    for method, network in NETWORKS.items():
        chain = Speculation(method=method, num_speculative_tokens=3)
        found[f"{method} chain"] = replace(KERNELS, speculation=chain, draft=network)
    for method, trees in TREES.items():
        tree = speculation_of({"method": method, "model": "head", **trees})
        found[f"{method} tree"] = replace(KERNELS, speculation=tree, draft=NETWORKS[method])
    return found


def of_transformers() -> dict[str, KernelSet]:
    """Return the kernels of a class of transformers whose modules ops replace, and of one that runs as it is."""
    kind = cut("qwen3", head_dim=32)
    values = getattr(transformers, kind.config)(**kind.values).to_dict()
    config = foreign_config({**values, "architectures": [kind.model]}, None)
    assert config.foreign is not None
    cpu = Ops(Platform(device_type="cpu"))
    decoder = ForeignDecoder(config.foreign, config.spec, cpu, dtype=torch.bfloat16, device=torch.device("cpu"))
    decoder.fill(None)
    decoder.prepare()
    written = replace(KERNELS, spec=config.spec, foreign=config.foreign, speculation=None)
    return {"fused": replace(written, recipe=decoder.recipe), "as written": written}


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


AGAIN = """
import json, pickle, sys, tempfile
from pathlib import Path
from ridgeline.worker.kernel_cache import keep_without_room
from ridgeline.worker.precompile import compile_claimed
keep_without_room(Path(sys.argv[1]))
with tempfile.TemporaryDirectory() as claims:
    done = compile_claimed(pickle.load(sys.stdin.buffer), Path(claims))
print(json.dumps([len(done.fresh), len(done.found)]))
"""


ALIKE = """
import json, pickle, sys
from ridgeline.kernels.base import aot
from ridgeline.worker import precompile
really, kernels, found, looks = precompile.compiling_for, pickle.load(sys.stdin.buffer), [], []
for launch_of in (aot._launch_of, lambda *_: looks.append(0) or object()):
    aot._launch_of, names = launch_of, []
    precompile.compiling_for = lambda arch, count, wanted, names=names: really(arch, count, names.append)
    precompile.compile_claimed(kernels, None)
    found.append(sorted(set(names)))
json.dump([found[0] == found[1], len(found[0]), len(looks)], sys.stdout)
"""


@pytest.mark.dealt
def test_launches_that_are_alike_are_looked_through_once_and_no_kernel_is_missed(kernels: KernelSet) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ALIKE]
    run = subprocess.run(command, input=pickle.dumps(kernels), capture_output=True, check=True)
    same, names, looks = json.loads(run.stdout)
    assert same
    assert looks > 2 * names > 60


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("rows", "tokens", "drafts"),
    [(1, 16, False), pytest.param(16, 256, True, marks=pytest.mark.thorough)],
    ids=["few kernels", "many kernels"],
)
def test_processes_fill_the_cache_and_the_next_start_needs_none(
    kernels: KernelSet, rows: int, tokens: int, drafts: bool, tmp_path: Path
) -> None:
    """Also with what only a Hopper GPU runs: kernels in Gluon, and if there are many, for rows that share blocks."""
    speculation = KERNELS.speculation if drafts else None
    kernels, labels = replace(kernels, max_seqs=rows, max_tokens=tokens, speculation=speculation), list[str]()
    assert processes_needed(kernels) == 14
    with Compilers(kernels, 2) as children:
        first = children.finish(lambda label, fraction: labels.append(label))
    assert len(first.fresh) > 10
    assert not first.found
    assert set(labels) == {"compiling kernels"}
    assert processes_needed(kernels) == 0
    options = ["--max-num-seqs", f"{rows}", "--max-num-batched-tokens", f"{tokens}"]
    options += ["--max-model-len", "64", "--dtype", "bfloat16"]
    if drafts:
        options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    command = ("compile", str(EMBEDDED_MODEL), "--arch", "sm_90", "--json", "--processes", "1", *options)
    run = subprocess.run([sys.executable, "-m", "ridgeline", *command], capture_output=True, text=True, check=True)
    second = json.loads(run.stdout)
    assert (second["compiled"], second["found"]) == (0, len(first.fresh))
    assert {"stream_kernel", "fused_kernel"} <= set(second["kernels"])
    assert not drafts or {"_items_kernel", "shared_kernel"} <= set(second["kernels"])
    cache, moved = tmp_path / "cache", tmp_path / "elsewhere"
    assert [path.name for path in cache.glob("ridgeline-*")] == [kernels.marker]
    cache.rename(moved)
    assert processes_needed(kernels) == 14
    assert processes_needed(kernels, moved) == 0
    run = subprocess.run(
        [sys.executable, "-c", AGAIN, moved], input=pickle.dumps(kernels), capture_output=True, check=True
    )
    assert json.loads(run.stdout) == [0, len(first.fresh)]
    assert not list(cache.rglob("*.cubin"))


@pytest.mark.thorough
def test_kernels_that_only_a_hopper_gpu_runs_are_known_beforehand(names_of: NamesOf) -> None:
    names = names_of("many kernels")
    for kernel in ("stream_kernel", "fused_kernel", "_items_kernel", "shared_kernel", "_lookup_drafts"):
        assert f".{kernel}[" in names


def test_a_model_without_feed_forwards_survives_the_way_into_another_process() -> None:
    spec = model_config(json.loads(FALCON_MAMBA.read_text())).spec
    there = pickle.loads(pickle.dumps(spec))
    assert all(layer.feed_forward is ABSENT for layer in there.layers)


def test_kernels_of_a_model_without_feed_forwards_are_known_beforehand(names_of: NamesOf) -> None:
    assert "scan" in names_of("no feed-forwards")


def test_kernels_that_steps_with_prompts_choose_by_their_lengths_are_known_beforehand(names_of: NamesOf) -> None:
    names = names_of("latents")
    assert "attention.latent.triton_kernel.latent_kernel" in names
    assert "attention.expanded.triton._expanded_attention" in names
    assert "attention.expanded.hopper_kernel.expanded_hopper_kernel" in names  # rows decide which one runs


def test_kernels_of_an_encoder_are_known_beforehand_and_no_schedule_is_wide(names_of: NamesOf) -> None:
    """A schedule of 24,000 rows, one for each token of a step, took longer to compile than all other kernels."""
    found = names_of("sounds")
    assert "_packed_attention" in found
    schedules = [name for name in found.splitlines() if "_schedule_kernel" in name]
    assert schedules
    assert not any(re.search(r"\b(4096|16384|65536)\b", name) for name in schedules)


def test_kernels_of_modules_of_transformers_are_known_beforehand(names_of: NamesOf) -> None:
    fused, written = (names_of(f"modules of transformers, {how}") for how in ("fused", "as written"))
    for kernel in ("gemm.plain.", "small.norm."):
        assert kernel in fused
        assert kernel not in written
    for names in (fused, written):
        assert "attention.decode" in names
        assert "step" in names


def test_every_package_that_a_step_runs_through_is_looked_at() -> None:
    root, seen, ahead = precompile.ROOT, set[Path](), [precompile.ROOT / "worker" / "runner.py"]
    while ahead:
        path = ahead.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        names = re.findall(r"ridgeline((?:\.\w+)+)", path.read_text())  # lazily imported ones are named in strings
        ahead += [root.joinpath(*name[1:].split(".")).with_suffix(".py") for name in names]
        ahead += [root.joinpath(*name[1:].split("."), "__init__.py") for name in names]
    packages = {path.relative_to(root).parts[0] for path in seen}
    assert {"kernels", "layers", "quantization"} <= packages
    # A docstring of the registry's names the engine; the files of adapters, which are read, decide no kernel
    assert packages - {"engine", "weights"} <= {*precompile.SOURCES}


def test_the_marker_stands_for_everything_that_decides_what_is_compiled(
    kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    markers = [
        kernels.marker,
        replace(kernels, max_seqs=3).marker,
        replace(kernels, spec=replace(kernels.spec, vocab_size=512)).marker,
        replace(kernels, overrides=(("linear", "reference"),)).marker,
        replace(kernels, quantization="fp8").marker,
        replace(kernels, forms=(("layers.0.mixer.qkv", HELD),)).marker,
    ]
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    markers.append(replace(kernels).marker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    line = {"op": "linear", "form": "", "sizes": [8, 64, 64], "cut": None}
    capability = divmod(int(kernels.arch.removeprefix("sm_")), 10)
    tuned.write(tuned.path_of(tuned.GpuKind(capability, kernels.multiprocessors)), [line])
    markers.append(replace(kernels).marker)
    package = tmp_path / "ridgeline"
    shutil.copytree(precompile.ROOT / "kernels", package / "kernels")
    monkeypatch.setattr(precompile, "ROOT", package)
    markers.append(replace(kernels).marker)
    (package / "kernels" / "base" / "launch.py").write_text("# changed")
    markers.append(replace(kernels).marker)
    assert len(set(markers)) == len(markers)
    assert replace(kernels).marker == markers[-1]


QUANTIZED: dict[str, tuple[dict[str, Any], bool]] = {  # what changes, and whether inputs are rounded
    "rounded when loaded": ({"quantization": "fp8"}, True),
    "quantized in the files": ({"forms": (("layers.0.mixer.qkv", HELD),)}, True),
    "plain": ({}, False),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_kernels_of_quantized_weights_are_known_beforehand(names_of: NamesOf, case: str) -> None:
    names, (_, rounding) = names_of(case), QUANTIZED[case]
    assert ("gemm.fp8.rounding.round_kernel" in names) == rounding
    assert "attention" in names


TARGET = read_model_config(EMBEDDED_MODEL).spec
NETWORKS: dict[str, ModelSpec | HeadSpec] = {
    "draft_model": read_model_config(EMBEDDED_DRAFT).spec,
    "eagle3": DraftHeadSpec(
        width=TARGET.hidden_size,
        layers=TARGET.layers[:1],
        taps=(1, 3, 5),
        joined="attention",
        entry_norm=TARGET.final_norm,
        final_norm=TARGET.final_norm,
        scored=128,
        narrow=True,
    ),
    "eagle": DraftHeadSpec(width=TARGET.hidden_size, layers=(replace(TARGET.layers[0], norms="feed_forward"),)),
    "medusa": MedusaSpec(width=TARGET.hidden_size, heads=3, blocks=1, bias=True),
}


TREES: dict[str, dict[str, Any]] = {
    "eagle3": {"num_speculative_tokens": 3, "eagle_topk": 2, "num_draft_tokens": 8},
    "medusa": {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"},
}


@pytest.mark.parametrize(
    ("method", "form"), [*((method, "chain") for method in NETWORKS), *((method, "tree") for method in TREES)]
)
def test_kernels_of_networks_that_draft_are_known_beforehand(names_of: NamesOf, method: str, form: str) -> None:
    """Steps with drafts run on tensors that hold nothing, so no shape of theirs depends on data, and nothing is read
    from the device."""
    names = names_of(f"{method} {form}")
    assert "attention" in names
    assert "step" in names
    assert ("compact" in names) == ("noised" in names) == (form == "tree")


@pytest.mark.parametrize("name", ["TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE"])
def test_nothing_is_started_that_triton_would_not_use(
    kernels: KernelSet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert processes_needed(kernels) == 0


def test_nothing_is_started_on_few_cores(kernels: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert processes_needed(kernels) == 0


@pytest.mark.parametrize("child", [(sys.executable, "-c", "raise SystemExit('broken')"), ("/nowhere/python",)])
def test_a_process_that_fails_is_only_logged(
    kernels: KernelSet,
    child: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(early, "CHILD", child)
    with caplog.at_level(logging.WARNING), Compilers(kernels, 2) as children:
        children.try_to_finish()
    assert "broken" in caplog.text or "/nowhere/python" in caplog.text
    assert not list(tmp_path.rglob(kernels.marker))


def test_an_interrupt_ends_the_processes(kernels: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "CHILD", (sys.executable, "-c", "import time; time.sleep(600)"))
    children = Compilers(kernels, 2)
    with suppress(KeyboardInterrupt), children:
        raise KeyboardInterrupt
    started = [each.process.pid for each in children._children]
    assert len(started) == 2
    assert not any(is_running(process) for process in started)


ENGINE = """
import sys, pickle, time
from ridgeline.worker.compilers import Compilers
with Compilers(pickle.load(sys.stdin.buffer), 2) as children:
    print(*(each.process.pid for each in children._children), flush=True)
    time.sleep(600)
"""


@pytest.mark.dealt
def test_processes_end_with_an_engine_that_is_killed(kernels: KernelSet) -> None:
    endless = replace(kernels, max_seqs=256, max_tokens=8192, max_model_len=8192)
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        pickle.dump(endless, engine.stdin)
        engine.stdin.close()
        started = [int(process) for process in engine.stdout.readline().split()]
        assert len(started) == 2
        assert all(is_running(process) for process in started)
        engine.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(is_running(process) for process in started))


def test_kernels_for_layers_that_are_not_there_are_refused_in_one_sentence() -> None:
    asked = ("--speculative-config", '{"method": "layer_skip", "num_speculative_tokens": 3, "skip_layers": [99]}')
    command = (sys.executable, "-m", "ridgeline", "compile", str(EMBEDDED_MODEL), "--arch", "sm_90", *asked)
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=compiling)
    assert run.returncode == 2
    assert "skip_layers of speculative_config is [99]" in run.stderr
    assert "Traceback" not in run.stderr
