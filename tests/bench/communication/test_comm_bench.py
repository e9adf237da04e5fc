"""`ridgeline comm bench`: what is right is timed, what is wrong is not, and lines through the figures are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.links import load_links
from ridgeline_bench.communication.cases import OPS, content, difference, expected, numbers
from ridgeline_bench.communication.figures import link_in, parse_ops, parse_sizes, size_name
from ridgeline_bench.communication.rank import _prepared
from ridgeline_bench.communication.room import Room, Trial, Way
from ridgeline_bench.communication.runs import Request, run
from ridgeline_bench.communication.ways import WAYS
from ridgeline_bench.results import read
from tests.command import run_here

pytestmark = pytest.mark.usefixtures("forked_ranks")

CPU = torch.device("cpu")
TOPOLOGY = """
\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-47
GPU1\tNV18\t X \tSYS\t0-47
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.dealt
def test_ranks_over_gloo_are_checked_timed_fitted_and_kept(tmp_path: Path) -> None:
    out, plot = tmp_path / "figures.jsonl", tmp_path / "picture.svg"
    flags = ["--device", "cpu", "--sizes", "1K,64K,1M", "--effort", "0.005", "--keep", "--json"]
    done = run_here("comm", "bench", *flags, "--out", out, "--plot", plot, "--commit", "abc")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ways = {(op, "gloo") for op in (*ops, "exchange")} | {("all_reduce", "gloo-scatter-gather")}
    cases = {(*way, n << 10) for way in ways for n in (1, 64, 1024)}
    assert {(f["op"], f["backend"], f["bytes"]) for f in told["figures"]} == cases
    for figure in told["figures"]:
        assert figure["us"] > 0, figure
        factor = {"send": 1.0, "all_reduce": 1.0, "exchange": 1.0}.get(
            figure["op"], 0.5
        )  # 2 (n - 1) / n and (n - 1) / n of two ranks
        assert figure["bus_gb_s"] == pytest.approx(factor * figure["bytes"] / figure["us"] / 1e3)
    assert {line["op"] for line in told["lines"]} == set(ops)
    records = read([out])
    assert len(records) == len(told["figures"])
    assert all(r.machine.commit == "abc" and r.machine.torch and r.unit == "µs" and r.samples for r in records)
    assert len(ElementTree.parse(plot).getroot().findall(".//{*}circle")) >= 2 * len(told["figures"])
    links = load_links(told["device"])
    assert links is not None
    assert links.seconds("all_reduce", 2, 64 << 10) > 0


@pytest.mark.thorough
def test_four_ranks_add_up_on_two_levels() -> None:
    request = Request(
        device="cpu",
        ranks=4,
        ops=["all_reduce", "exchange"],
        sizes=[1000, 70_000],
        backends=["gloo-two-level", "gloo-scatter-gather", "gloo"],
        seconds=60,
        effort=0,
    )
    done = [event for event in run(request) if event["event"] != "begins"]
    assert {event["event"] for event in done} == {"measured"}
    assert len([event for event in done if event["backend"] == "gloo-two-level"]) == 2
    assert len(done) == 2 * (3 + 1)


def test_what_cannot_be_asked_is_one_sentence() -> None:
    for flags, sentence in (
        (["--sizes", "8X"], "'8X' is no size"),
        (["--sizes", "1M:1K"], "runs backwards"),
        (["--ops", "gather"], "'gather' is no collective"),
        (["--backends", "nccl"], "'nccl' is no way between 2 cpu ranks; there are gloo"),
        (["--backends", "gloo-two-level"], "there are gloo, gloo-scatter-gather."),
        (["--backends", "gloo-two-level", "--ranks", "5"], "there are gloo, gloo-scatter-gather."),
        (["--ranks", "1"], "nobody to talk to"),
        (["--plot", "a.gif"], "writes .svg"),
        (["--device", "cuda"], "cuda"),
    ):
        done = run_here("comm", "bench", "--device", "cpu", *flags)
        assert (done.returncode, done.stdout) == (2, ""), flags
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.dealt
def test_processes_that_cannot_begin_are_told_and_nothing_hangs() -> None:
    if torch.cuda.is_available():
        pytest.skip("here GPUs' ranks begin")
    request = Request(
        device="cuda", ranks=2, ops=["all_reduce"], sizes=[1024], backends=["nccl-ring-ll"], seconds=60, effort=0
    )
    (event,) = run(request)
    assert (event["event"], event["backends"]) == ("lost", ["nccl-ring-ll"])
    assert event["log"]


def test_a_wrong_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(spoil: Callable[[Tensor], object]) -> Way:
        def made(room: Room, count: int) -> Trial:
            x_N = room.zeros(count)

            def call() -> Tensor:
                y_N = x_N.clone()
                spoil(y_N)
                return y_N

            return Trial(x_N, call)

        return made

    spoils: dict[str, Callable[[Tensor], object]] = {
        "right": lambda y_N: None,
        "one number": lambda y_N: y_N[77].add_(1),
        "shifted": lambda y_N: y_N.copy_(y_N.roll(1)),
        "not written": lambda y_N: y_N.fill_(float("nan")),
        "raises": lambda y_N: y_N[10**9],
    }
    room = Room(0, 2, CPU, torch.float32)
    for name, spoil in spoils.items():
        monkeypatch.setitem(WAYS["peer-copy"], "copy", way(spoil))
        trial, why = _prepared(room, "copy", "peer-copy", 4096)
        assert (trial is not None) == (name == "right"), name
        assert (None if why is None else why[0]) == {"right": None, "raises": "failed"}.get(name, "wrong")


def test_each_rank_and_place_brings_other_numbers_and_their_sums_are_exact() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        count = numbers("all_reduce", 40_000, 8, dtype)
        assert count % 64 == 0
        brought = torch.stack([content(rank, count, dtype, CPU) for rank in range(8)])
        assert len({tuple(row.tolist()) for row in brought}) == 8
        want_N = expected("all_reduce", 3, 8, count, dtype, CPU)
        assert want_N.tolist() == brought.long().sum(0).tolist()
        parts = [expected("reduce_scatter", rank, 8, count, dtype, CPU) for rank in range(8)]
        assert torch.equal(torch.cat(parts), want_N)
        part = count // 8
        crossed_N = expected("all_to_all", 5, 8, count, dtype, CPU)
        assert torch.equal(crossed_N[2 * part : 3 * part], brought[2, 5 * part : 6 * part])
        assert torch.equal(expected("exchange", 5, 8, count, dtype, CPU), torch.cat([crossed_N, brought[5]]))
        assert torch.equal(expected("send", 0, 8, count, dtype, CPU), brought[7])


def test_a_norm_is_compared_with_one_in_float64() -> None:
    want_N = expected("all_reduce", 0, 2, 8192, torch.float32, CPU)
    rows = want_N.double().view(2, 4096)
    normed = torch.nn.functional.rms_norm(rows, (4096,), eps=1e-5).view(-1)
    assert difference("all_reduce_norm", normed.bfloat16(), want_N) is None
    assert difference("all_reduce_norm", (1.05 * normed).bfloat16(), want_N) is not None


def test_sizes_ops_and_links_are_read_as_written() -> None:
    assert parse_sizes("8K, 1k,1M") == [1024, 8192, 1 << 20]
    assert parse_sizes("1K:20K") == [1024, 4096, 16384]
    assert [size_name(n) for n in (512, 8192, 3 << 19, 1 << 30)] == ["512", "8K", "1.5M", "1G"]
    assert parse_ops("put,all-reduce get") == ["send", "all_reduce"]
    assert parse_ops("") == list(OPS)
    assert link_in(TOPOLOGY) == "NV18"
    assert link_in("nothing") == ""
    with pytest.raises(InvalidConfig, match="end at 16G"):
        parse_sizes("64G")


BENCH = """
import json, sys
from ridgeline import cli
from ridgeline_bench.communication import runs

def run(request):
    before = packages()
    about = {"event": "measured", "op": "all_reduce", "backend": "gloo", "ranks": 2}
    yield from ({**about, "bytes": size, "samples": [1e-5]} for size in (1024, 4096))
    seen.update(before)

def packages():
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names

seen = set()
runs.run = run
sys.argv = ["ridgeline", "comm", "bench", "--device", "cpu", "--keep", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as left:
    assert not left.code, left.code
assert seen, "nothing was measured"
print(*packages() - seen)
"""


@pytest.mark.dealt
def test_every_package_is_there_before_anything_is_measured(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path / "figures.jsonl"), "--plot", str(tmp_path / "picture.svg")]
    done = subprocess.run([sys.executable, "-c", BENCH, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""  # the packages that came later


def test_a_missing_package_is_one_sentence_before_anything_is_measured() -> None:
    code = "import sys; sys.modules['torch'] = None; from ridgeline import cli; cli.main()"
    command = [sys.executable, "-c", code, "comm", "bench"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ridgeline: comm bench needs the package torch, which is not installed.\n"


@pytest.mark.dealt
def test_tables_and_pictures_need_torch_and_rich_alone() -> None:
    """A machine that only measures has no package of the server, and says so for none of it after a minute's work."""
    code = "import sys; sys.modules['msgspec'] = None; import ridgeline_bench.communication.show"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
