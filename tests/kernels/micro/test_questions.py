"""Micros: what their files say, what they compile to, and the host's part on a GPU that is not there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ridgeline.kernels.cuda import carried
from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.gemm.ladder.hip import clang
from ridgeline.kernels.micro import hosted, run
from ridgeline.kernels.micro.machine_code import compiled, counted
from ridgeline.kernels.micro.questions import SOURCES, BadQuestion, Micro, MicroCase, micros, read
from ridgeline.kernels.micro.run import AskedMicro, WrongAnswer, golden
from ridgeline_bench.ladders.micro import answers
from ridgeline_bench.machine import caches
from ridgeline_bench.machine.calibrate import as_calibration
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import QUICK
from tests.kernels.compiled import facts
from tests.kernels.micro.absent import FakeKernel, absent_gpu, fill

MICROS = {micro.name: micro for micro in micros()}
UNITS = {
    "cycles", "B/cycle", "lanes/cycle", "FLOP/cycle", "TB/s", "/ns", "µs",
    "instructions", "waves", "mode", "lanes", "registers", "answers", "wrong numbers",
}  # fmt: skip


def case_of(name: str, part: str) -> tuple[Micro, MicroCase]:
    micro = MICROS[name]
    return micro, next(case for case in micro.cases if part in case.name)


@pytest.mark.parametrize("micro", MICROS.values(), ids=MICROS)
def test_a_micro_asks_one_question_and_says_what_it_expects(micro: Micro) -> None:
    assert micro.question.endswith("?")
    assert micro.hypothesis.endswith(".")
    assert {case.unit for case in micro.cases} <= UNITS
    assert len({case.name for case in micro.cases}) == len(micro.cases)
    text = " ".join(case.published for case in micro.cases)
    assert {word.split("]")[0] for word in text.split("[")[1:]} <= SOURCES.keys()


def test_numbers_of_files_are_in_order_and_none_occurs_twice() -> None:
    numbers = [micro.source.name.split("_")[0] for micro in micros()]
    assert numbers == sorted(set(numbers))


TABLE = "// | case | predicted | unit | settings | published |\n// |---|---|---|---|---|\n"
HEAD = f"// Is it?\n//\n// Hypothesis: yes.\n//\n{TABLE}"


@pytest.mark.parametrize(("text", "wrong"), [
    ("// It is.\n//\n// Hypothesis: yes.\n", "must begin with a question"),
    ("// Is it?\n// Hypothesis: yes.\n", "an empty line behind its question"),
    ("// Is it?\n//\n// Hypothesis: yes.\n", "needs a table"),
    (HEAD, "needs a table"),
    (HEAD + "// | a | 1 | cycles |\n", "a case of 3 cells"),
    (HEAD + "// | a | 1 | cycles | blocks=3 | |\n", "settings that there are not: blocks"),
])  # fmt: skip
def test_a_file_that_does_not_ask_is_refused(text: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "99_bad.cu"
    file.write_text(text)
    with pytest.raises(BadQuestion, match=wrong):
        read(file)


def test_verdicts_are_near_for_rates_and_exact_for_counts() -> None:
    assert MicroCase("", 100, "cycles").verdict(114) == "as predicted"
    assert MicroCase("", 100, "cycles").verdict(120) == "1.20 times"
    assert MicroCase("", 8, "waves").verdict(7) == "0.88 times"
    assert MicroCase("", 0, "answers").verdict(0) == "as predicted"
    assert MicroCase("", 0, "answers").verdict(3) == "not none"


# What the machine code of a case must have: how often each instruction. Else the case measures something else.
CODE: dict[tuple[str, str], dict[str, int]] = {
    ("levels", "L1, 16 KB"): {"LDG.E.64.STRONG.SM": 9},  # eight in a row, and one for the rest
    ("levels", "L2, 1 MB"): {"LDG.E.64.STRONG.GPU": 9},
    ("rates", "L2, 17 MB"): {"LDG.E.128.STRONG.GPU": 24},
    ("banks", "neighbouring words"): {"LDS ": 8},
    ("banks", "8 bytes a lane"): {"LDS.64": 8},
    ("banks", "16 bytes a lane"): {"LDS.128": 8},
    ("warps", "a test and a vote of it, one"): {"VOTE.ANY": 5},
    ("warps", "match of any lane, one"): {"MATCH.ANY": 5},
    ("warps", "match of all"): {"MATCH.ALL": 5},
    ("register_cache", "shared memory"): {"LDS": 7, "STS": 1, "SHFL": 0},
    ("register_cache", "shuffles, a sum"): {"SHFL.IDX": 6, "LDS": 0},
    ("register_cache", "shuffles, eight"): {"SHFL.IDX": 6, "LDS": 0},
    ("cluster_memory", "all from"): {"LD.E.128": 4},
    ("bytes_in_flight", "128 threads, eight loads"): {"LDG.E.128": 8},
    ("atomics", "global memory, one address"): {"REDUX": 0},  # the compiler does not add up by itself
    ("atomics", "shared memory, one address, a lane"): {"REDUX.SUM": 5},
    ("launches", "in a stream, dependent"): {"PREEXIT": 1, "ACQBULK": 1},
    ("mma_sync", "m16n8k32, e4m3"): {"HMMA.16816.F32": 32, "QMMA": 0},  # fp8 is widened to float16
    ("mma_sync", "m16n8k16, bf16, sums"): {"HMMA.16816.F32.BF16": 24},
    ("wgmma", "64 x 8 x 16, A"): {"HGMMA.64x8x16.F32.BF16": 16},
}


@pytest.mark.parametrize(("name", "part"), CODE, ids=["-".join(each)[:40] for each in CODE])
def test_a_micro_is_compiled_to_the_instructions_that_it_asks_about(name: str, part: str) -> None:
    micro, case = case_of(name, part)
    code = facts(micro.source, "sm_90a", case.defines)
    assert {mnemonic: code.number(mnemonic) for mnemonic in CODE[name, part]} == CODE[name, part]


def test_no_micro_of_the_gpu_has_a_stack() -> None:
    assert [code.name for code in run.codes() if facts(code.source, code.arch, code.defines).stack] == []


@pytest.mark.skipif(not clang(), reason="no clang for AMD GPUs; on Debian: apt-get install clang-22")
@pytest.mark.parametrize("part", ["gfx1100, shuffles", "gfx942, shuffles", "gfx942, DPP"])
def test_a_compiler_answers_as_predicted(part: str) -> None:
    micro, case = case_of("wave_sums", part)
    assert case.verdict(compiled(micro, case)[0]) == "as predicted"


def test_figures_of_an_assembly() -> None:
    assembly = "\tv_add_f32_e32 v0, v1\n\tv_add_f32_dpp v0, v1\n    .vgpr_count:     28\n; Occupancy: 7\n"
    wanted = {"v_add_f32": 1, "v_add_f32_dpp": 1, "vgpr_count": 28, "occupancy": 7}
    assert {what: counted(assembly, what) for what in wanted} == wanted
    assert counted(assembly, "ds_bpermute_b32") == 0


def test_a_ring_leads_through_every_line() -> None:
    for lines in (128, 8192, 327_681):
        assert len({n * golden(lines) % lines for n in range(lines)}) == lines


def asked(name: str, part: str, sum_of_words: int | None, wrong: int = 0) -> AskedMicro:
    """A case whose kernel takes 1,000 cycles for 10 operations.

    sum_of_words: what the kernel says, by default what is right.
    """
    micro, case = case_of(name, part)
    made: list[AskedMicro] = []

    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        right = made[0]._sum or 0
        told = right if sum_of_words is None else sum_of_words
        for entry in range(case.number("entries", grid[0])):
            fill(arguments, entry, 1000 + entry, 10, wrong, told % 2**32 if entry == 0 else 0)

    with absent_gpu(FakeKernel(answer), seconds=1e-6):
        made.append(AskedMicro(micro, case))
        made[0].samples(2)
        return made[0]


def test_the_host_takes_answers_of_the_chosen_entry() -> None:
    micro, case = case_of("partitions", "one multiprocessor: the farthest")

    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        for entry in range(2048):
            fill(arguments, entry, entry, 1, 0, 0)

    with absent_gpu(FakeKernel(answer)):
        assert AskedMicro(micro, case).samples(2) == [1843, 1843]  # nine tenths of 2,048


def test_rates_by_time_count_what_all_blocks_did() -> None:
    micro, case = case_of("rates", "L1")
    case = MicroCase(case.name, 1, "TB/s", case.defines, {**case.launch, "check": "none"})

    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        for entry in range(grid[0]):
            fill(arguments, entry, 1000, 4_000_000, 0, 0)

    with absent_gpu(FakeKernel(answer), seconds=1e-3):
        assert AskedMicro(micro, case).samples(1) == [pytest.approx(132 * 4e6 / 1e-3 / 1e12)]


def test_wrong_results_have_no_time() -> None:
    asked("rates", "L1", None)
    with pytest.raises(WrongAnswer, match="the sum is"):
        asked("rates", "L1", 12345)
    with pytest.raises(WrongAnswer, match="1 of 1 entries"):
        asked("banks", "neighbouring", None, wrong=1)
    with absent_gpu(FakeKernel(lambda grid, arguments: None)):  # blocks that say nothing
        silent = AskedMicro(*case_of("rates", "L1"))
        with pytest.raises(WrongAnswer, match="132 of 132"):
            silent.ask()


def test_fragments_are_wrong_where_a_lane_has_another_number() -> None:
    micro, case = case_of("fragments", "ldmatrix.x4")

    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """ldmatrix: lane l gets, of matrix i, the numbers 2 (l % 4) and the next of row l / 4."""
        out, rows = ((ctypes.c_uint32 * 128).from_address(arguments[at].value) for at in (0, 1))
        for lane in range(32):
            for matrix in range(4):
                out[4 * lane + matrix] = rows[4 * (8 * matrix + lane // 4) + lane % 4]

    with absent_gpu(FakeKernel(answer)):
        assert hosted.samples(micro, case) == [0.0]

    def swapped(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        answer(grid, arguments)
        out = (ctypes.c_uint32 * 128).from_address(arguments[0].value)
        out[0], out[5] = 0x7FC07FC0, 0x7FC07FC0  # two words that are no numbers

    with absent_gpu(FakeKernel(swapped)):
        assert hosted.samples(micro, case) == [4.0]


def test_a_launch_that_did_not_run_is_found() -> None:
    micro, case = case_of("launches", "in a stream, device")

    def runs(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        (ctypes.c_longlong * 1).from_address(arguments[0].value)[0] += 1

    with absent_gpu(FakeKernel(runs), seconds=4e-4):
        assert hosted.samples(micro, case) == [pytest.approx(2.0)] * 5  # µs: 200 launches in 0.4 ms
    with absent_gpu(FakeKernel(lambda grid, arguments: None)), pytest.raises(WrongAnswer, match="0 of 1003"):
        hosted.samples(micro, case)


def test_answers_of_a_driver_that_differ_are_counted() -> None:
    micro, case = case_of("occupancy", "few registers")

    def resident(threads: int, shared: int) -> int:
        of = run.blocks("1", 1)
        return hosted.occupancy("sm_90", threads, 32, shared).blocks + (of if threads == 64 else 0)

    with absent_gpu(FakeKernel(lambda grid, arguments: None, resident)):
        assert hosted.samples(micro, case) == [float(len(hosted.SHARED))]


@pytest.mark.parametrize(("multiprocessors", "pieces"), [(132, 1_081_344), (108, 884_736), (160, 1_310_720)])
def test_data_are_a_multiple_of_what_all_threads_load(multiprocessors: int, pieces: int) -> None:
    micro, case = case_of("rates", "L2, 17 MB")
    told: list[tuple[int, int]] = []

    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        told.append((grid[0], arguments[2].value))
        words = (ctypes.c_uint32 * (4 * pieces)).from_address(arguments[1].value)
        sums = int(torch.frombuffer(words, dtype=torch.int32).sum()) * case.number("rounds", 1)
        for entry in range(grid[0]):
            fill(arguments, entry, 1, 1, 0, sums % 2**32 if entry == 0 else 0)

    with absent_gpu(FakeKernel(answer), multiprocessors=multiprocessors):
        AskedMicro(micro, case).ask()
    assert told == [(multiprocessors, pieces)]


def refuse(*_: object) -> bytes:
    raise NoCudaCompiler("there is none")


def test_a_case_that_does_not_compile_leaves_the_others() -> None:
    with absent_gpu(FakeKernel(lambda grid, arguments: None)), patch.object(run, "code_of", refuse):
        found = list(answers(torch.device("cuda"), only="banks"))
    assert [each.error for each in found] == ["there is none"] * 12
    assert not any(each.samples for each in found)


def test_a_command_fills_a_folder_and_a_file_that_lacks_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = next(run.codes())
    monkeypatch.setattr(run, "codes", lambda: [few])
    run.main(tmp_path / "full", ["sm_90"])
    assert carried.code_of(few, "sm_90a", tmp_path / "full", run.MADE_BY)[:4] == b"\x7fELF"
    with pytest.raises(NoCudaCompiler, match=rf"python -m ridgeline\.kernels\.micro\.run {tmp_path} sm_90\.$"):
        carried.code_of(few, "sm_90a", tmp_path, run.MADE_BY)


def test_a_calibration_asks_for_the_rate_of_l2_and_for_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        for entry in range(grid[0]):
            fill(arguments, entry, 1, 1000, 0, 0)

    monkeypatch.setattr(run, "expected", lambda *_: None)
    monkeypatch.setattr(run, "ring", lambda lines, step: torch.zeros(16))
    bench = Bench(torch.device("cuda"), QUICK, cache=1, free=1)
    with absent_gpu(FakeKernel(answer), seconds=1e-3):
        found = {probe.name: (probe.run(), probe.unit) for probe in caches.cache_probes(bench)}
    assert found == {
        "L2 latency": (pytest.approx(1e-6), "s"),
        "memory latency": (pytest.approx(1e-6), "s"),
        "L2 read": (pytest.approx(132 * 1000 / 1e-3), "B/s"),
    }
    with absent_gpu(FakeKernel(answer)), patch.object(run, "code_of", refuse):
        assert caches.cache_probes(bench) == [], "no driver takes the code, or no compiler is here"
    measured = {"read": 4e12, **{name: value for name, (value, _) in found.items()}}
    kept = as_calibration(torch.device("cpu"), measured)
    assert (kept.l2_read, kept.l2_latency) == (found["L2 read"][0], found["L2 latency"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("part", [case.name for case in MICROS["fragments"].cases])
def test_fragments_on_a_gpu(part: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("two of these instructions are Hopper's")
    assert hosted.samples(*case_of("fragments", part)) == [0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("part", [case.name for case in MICROS["occupancy"].cases])
def test_the_drivers_occupancy_on_a_gpu(part: str) -> None:
    assert hosted.samples(*case_of("occupancy", part)) == [0.0]
