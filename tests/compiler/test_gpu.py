"""Kernels for GPUs, without one: the PTX is run by a machine of NumPy, and what is planted in it is found."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ridgeline.cli import command_line
from ridgeline.compiler import mlir
from ridgeline.compiler.artifacts import ArtifactStore
from ridgeline.compiler.backend import CompilerOptions
from ridgeline.compiler.child import CompilationFailed, CompilerProcess
from ridgeline.compiler.graph import GraphNode
from ridgeline.compiler.mapping import gpu_text, lane_schedule
from ridgeline.compiler.targets import CudaTarget, NodeKernel
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.compiled_chains import (
    BOUNDS,
    CHAINS,
    gate,
    masked_softmax,
    program_of,
    rms_norm,
    softmax,
)
from tests.compiler import ptx_machine

if why := mlir.available():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("llvmlite")


class EmulatedTarget(CudaTarget):
    """A GPU that is a machine of NumPy, with tensors of the CPU. changed: what is done to PTX before it runs."""

    device = "cpu"

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__("sm_90", store)
        self.changed: Callable[[str], str] = str

    def kernel(self, node: GraphNode) -> NodeKernel:
        text = gpu_text(node)
        ptx = self.changed(self.artifact(text).code.decode())

        def run(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            ptx_machine.run(ptx, text.blocks, [*inputs, *outputs], text.count)

        return run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EmulatedTarget:
    return EmulatedTarget(ArtifactStore([tmp_path_factory.mktemp("artifacts")]))


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    x[0, 0], x[-1, -1] = torch.inf, torch.nan
    return x, w


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [*CHAINS, masked_softmax, gate])
@pytest.mark.parametrize("shape", [(3, 7), (5, 96), (2, 1280)])
def test_ptx_makes_what_torch_makes(
    target: EmulatedTarget, function: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, w = inputs(shape, dtype)
    program = program_of(function, x, w, target)
    assert program.num_kernels
    assert not program.fallbacks
    (made,) = program(x, w)
    torch.testing.assert_close(made, function(x, w), rtol=BOUNDS[dtype], atol=BOUNDS[dtype], equal_nan=True)


def test_rows_that_are_long_are_read_in_a_loop(target: EmulatedTarget) -> None:
    x, w = inputs((2, 36000), torch.float32)
    program = program_of(softmax, x, w, target)
    assert "a loop" in str(lane_schedule(program.graph.nodes[0]))
    torch.testing.assert_close(program(x, w)[0], softmax(x, w), equal_nan=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", 16, 31, -1", ", 8, 31, -1"),
        ("mul.rn.f32", "add.rn.f32"),
        ("add.rn.f32", "sub.rn.f32"),
        ("+4096]", "+4112]"),
    ],
)
def test_a_planted_fault_is_found(target: EmulatedTarget, old: str, new: str) -> None:
    x, w = inputs((3, 4096), torch.bfloat16)
    target.changed = lambda ptx: ptx.replace(old, new)
    try:
        program = program_of(softmax, x, w, target)
        with pytest.raises((ptx_machine.PtxFault, AssertionError)):
            torch.testing.assert_close(program(x, w)[0], softmax(x, w), equal_nan=True, rtol=0.03, atol=0.03)
    finally:
        target.changed = str


def test_a_kernel_reads_16_bytes_a_lane_and_reduces_by_shuffles(target: EmulatedTarget) -> None:
    x, w = inputs((3, 4096), torch.bfloat16)
    (node,) = program_of(rms_norm, x, w, target).graph.nodes
    ptx = target.artifact(gpu_text(node)).code.decode()
    assert ptx.count("ld.global.v4.b32") == 4  # two of x, two of w
    assert ptx.count("st.global.v4.b32") == 2
    assert ptx.count("shfl.sync") == 5 + 3
    assert ptx.count("bar.sync") == 1


def test_equal_layers_have_one_artifact_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    store = ArtifactStore([tmp_path])
    target = EmulatedTarget(store)
    x, w = inputs((3, 96), torch.float32)
    for rows in (3, 5, 700):
        program_of(rms_norm, x[:1].expand(rows, 96), w, target)
    assert (store.hits, store.misses) == (2, 1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b"add.rn", b"sub.rn"))
    program_of(rms_norm, x, w, target)
    assert (store.hits, store.misses) == (2, 2)


def test_a_kernel_that_takes_too_long_or_too_much_ends_the_child_alone() -> None:
    with pytest.raises(CompilationFailed, match=r"ended on a kernel for sm_90"):
        CompilerProcess(seconds=0.01).compile("module {}", "sm_90")
    child = CompilerProcess()
    with pytest.raises(CompilationFailed, match=r"MLIRError"):
        child.compile("gpu.module @kernels { nothing }", "sm_90")


def test_an_answer_that_nobody_waited_for_is_of_no_later_kernel() -> None:
    process = CompilerProcess()
    child = process._started()

    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

        def close(self) -> None:
            """The pipe behind it ends with the child."""

    child.stdout = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):  # behind a request that is under way
        process.compile("", "sm_1")
    with pytest.raises(CompilationFailed, match="MLIRError"):
        process.compile("nothing", "sm_90")
    process._end()


def test_a_child_ends_with_what_it_started() -> None:
    process = CompilerProcess()
    assert os.getpgid(process._started().pid) == process._started().pid
    process._end()
    read, write = os.pipe()
    command = ["sh", "-c", "sleep 60 & wait"]
    pipe = subprocess.PIPE
    process._child = subprocess.Popen(command, stdout=pipe, text=True, start_new_session=True, pass_fds=[write])
    os.close(write)
    process._end()
    assert select.select([read], [], [], 10.0)[0] == [read]  # all that had the other end are gone
    os.close(read)


def test_files_that_are_no_artifacts_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kernel")
    (tmp_path / "zeros.kernel").symlink_to("/dev/zero")
    (tmp_path / "folder.kernel").mkdir()
    store = ArtifactStore([tmp_path])
    assert [store.get(key) for key in ("pipe", "zeros", "folder", "none")] == [None] * 4


def test_options_are_named() -> None:
    with pytest.raises(InvalidConfig, match="there is no option 'rounded'"):
        CompilerOptions.of({"rounded": "once"})
    with pytest.raises(InvalidConfig, match="say torch or float32"):
        CompilerOptions.of({"rounding": "once"})


def test_code_for_amd_is_made(tmp_path: Path) -> None:
    command = ["ridgeline_bench.scripts.compiled_chains:softmax", "--input", "bfloat16[64, 4096]", "bfloat16[4096]"]
    options = ["--target", "gfx942", "--print-after", "fuse", "GCN", "--artifacts", str(tmp_path)]
    made = CliRunner().invoke(command_line("compile-graph"), ["compile-graph", *command, *options])
    assert made.exit_code == 0, made.output
    assert "= sum(" in made.output
    assert made.output.count("global_load_dwordx4") == 4
    assert "kernels for gfx942: 1, calls of torch: 0" in made.output
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing:at_all"], "there is no nothing:at_all"),
        (["torch:sin", "--input", "float[4]x"], "is no tensor"),
        (["torch:sin", "--input", "float32[4]", "--target", "sm_1"], "there is no target 'sm_1'"),
        (["torch:sin", "--input", "float32[4]", "--print-after", "never"], "there is no stage 'never'"),
        (["torch:sin", "--input", "float32[4]", "float32[4]"], "does not take these tensors"),
        (["torch:sin", "--input", "float32[9999999999, 9999999999]"], "does not take these tensors: RuntimeError"),
        (["operator:methodcaller", "--input", "float32[4]"], "does not take these tensors"),
        (["..torch:sin", "--input", "float32[4]"], "say module:function"),
        (["torch:sin", "--input", "float32[4]", "--artifacts", "/dev/null/x"], "cannot be filled"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        CliRunner().invoke(command_line("compile-graph"), ["compile-graph", *words], catch_exceptions=False)


def test_a_damaged_export_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "damaged.pt2").write_bytes(b"no archive")
    with pytest.raises(InvalidConfig, match=r"is no file of torch\.export\.save"):
        CliRunner().invoke(
            command_line("compile-graph"), ["compile-graph", str(tmp_path / "damaged.pt2")], catch_exceptions=False
        )


def test_a_forked_process_leaves_the_child_alone() -> None:
    process = CompilerProcess()
    with pytest.raises(CompilationFailed, match="MLIRError"):
        process.compile("nothing", "sm_90")
    child = process._child
    process.forget()
    process._end()
    assert child is not None
    assert child.poll() is None
    child.kill()
    child.communicate()
