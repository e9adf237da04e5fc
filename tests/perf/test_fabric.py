"""Networks on paper: sizes by hand, sums against the simulation that sends every message, and what the page says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.fabric import GENERATIONS, MESSAGE, START, SWITCH, Fabric, ways
from ridgeline.perf.hardware import find
from ridgeline.perf.links import Line, Links, assumed, bus_factor
from ridgeline_bench.scripts.sum_forms import FAST, SLOW, seconds, two_levels

NDR, XDR = GENERATIONS["ndr"], GENERATIONS["xdr"]
LINKS = assumed(find("H100"))
MIB = 1 << 20


def tree(endpoints: int, **more: float) -> Fabric:
    return Fabric(topology="fat-tree", generation=NDR, endpoints=endpoints, **more)


def dragonfly(endpoints: int, **more: float) -> Fabric:
    return Fabric(topology="dragonfly", generation=NDR, endpoints=endpoints, **more)


@pytest.mark.parametrize(
    ("endpoints", "levels", "switches", "passed"),
    [(64, 1, 1, 1), (1024, 2, 48, 3), (2048, 2, 96, 3), (2049, 3, 161, 5), (65_536, 3, 5120, 5)],
)
def test_fat_trees_of_64_ports(endpoints: int, levels: int, switches: int, passed: int) -> None:
    """1,024: 32 leaves of 32 endpoints and 16 spines. Full at three levels: 5 r² / 4 switches (Al-Fares et al.)."""
    found = tree(endpoints)
    assert (found.levels, found.switches, found.passed) == (levels, switches, passed)
    assert found.bisection == endpoints / 2 * 50e9


def test_dragonflies_of_64_ports() -> None:
    """16 endpoints a switch, 32 switches and 512 endpoints a group, 16 long cables a switch: up to 513 groups."""
    assert 16 + 31 + 16 <= 64 < 17 + 33 + 17
    assert dragonfly(1024).most == 16 * 32 * (32 * 16 + 1) == 262_656
    assert (dragonfly(1024).local, dragonfly(1024).switches) == (512, 64)
    assert (dragonfly(512).passed, dragonfly(1024).passed) == (2, 4)
    assert dragonfly(1024, taper=2).bisection == dragonfly(1024).bisection / 2
    assert dragonfly(512, taper=2).bisection == dragonfly(512).bisection, "within a group nothing is tapered"


def linked(alpha: float, rate: float) -> Links:
    lines = tuple(
        Line(op, "nccl", 8, 7 * alpha, bus_factor(op, 8) / rate)
        for op in ("reduce_scatter", "all_gather", "all_to_all")
    )
    return Links(device="simulated", lines=lines, source="")


@pytest.mark.parametrize("hosts", [2, 4, 16])
@pytest.mark.parametrize("nbytes", [8192, MIB, 64 * MIB])
def test_a_ring_over_hosts_takes_what_the_simulation_takes(hosts: int, nbytes: int) -> None:
    """Beside what the simulation does not have: the start of a collective, and switches."""
    simulated = seconds(two_levels(8 * hosts, nbytes, hosts), 8 * hosts, hosts)
    assert (MESSAGE, 1 / NDR.rate) == SLOW
    found = ways(tree(8 * hosts), "all_reduce", nbytes, per_host=8, links=linked(FAST.alpha, 1 / FAST.beta))
    ring = next(way for way in found if way.name == "ring")
    switches = 2 * (hosts - 1) * tree(8 * hosts).passed * SWITCH
    assert ring.total - START - switches == pytest.approx(simulated, rel=0.01)


def test_sums_over_1024_by_hand() -> None:
    found = {way.name: way for way in ways(tree(1024), "all_reduce", 256 * MIB, per_host=8, links=LINKS)}
    part, message = 32 * MIB, 5e-6 + 3 * 0.2e-6
    assert found["ring"].between == pytest.approx(14.5e-6 + 254 * message + 254 / 128 * part / 50e9)
    assert found["tree"].between == pytest.approx(14.5e-6 + 14 * message + 2 * part / 50e9)
    assert found["SHARP"].between == pytest.approx(14.5e-6 + 2 * message + part / 50e9)
    assert {way.inside for way in found.values()} == {
        LINKS.seconds("reduce_scatter", 8, 256 * MIB) + LINKS.seconds("all_gather", 8, 256 * MIB)
    }


def test_all_to_alls_by_hand() -> None:
    def between(fabric: Fabric) -> float:
        (way,) = ways(fabric, "all_to_all", 256 * MIB, per_host=8, links=LINKS)
        return way.total - START - fabric.message

    away = 256 * MIB * 1016 / 1024 / 50e9
    assert between(tree(1024)) == pytest.approx(away)
    assert between(tree(1024, taper=2)) == pytest.approx(256 * MIB * 992 / 1024 * 2 / 50e9), "32 share a leaf"
    assert between(dragonfly(1024, taper=2)) == pytest.approx(256 * MIB * 512 / 1024 * 2 / 50e9)
    assert between(dragonfly(1024, taper=1.5)) == pytest.approx(away), "half of it stays in the group"


@given(
    st.sampled_from(["fat-tree", "dragonfly"]),
    st.sampled_from(sorted(GENERATIONS)),
    st.integers(1, 500),
    st.floats(1, 8),
    st.sampled_from(["all_reduce", "all_to_all"]),
    st.floats(1, 1e10),
)
def test_more_bytes_and_a_taper_never_help(
    topology: str, rate: str, hosts: int, taper: float, op: str, nbytes: float
) -> None:
    generation = GENERATIONS[rate]
    full, tapered = (
        Fabric(topology=topology, generation=generation, endpoints=8 * hosts, taper=by) for by in (1.0, taper)
    )
    (best, *_), (more, *_), (slower, *_) = (
        ways(fabric, op, size, per_host=8, links=LINKS)
        for fabric, size in ((full, nbytes), (full, 2 * nbytes), (tapered, nbytes))
    )
    assert best.total <= more.total * (1 + 1e-9)
    assert best.total <= slower.total * (1 + 1e-9)
    if hosts > 1 and op == "all_reduce":
        assert best.name == "SHARP"
        assert best.between >= nbytes / 8 / generation.rate, "a port carries its part at least once"


def test_one_host_needs_no_network() -> None:
    (way,) = ways(tree(8), "all_reduce", MIB, per_host=8, links=LINKS)
    assert way == ("one host", LINKS.seconds("all_reduce", 8, MIB), 0.0)


def test_mistakes_are_one_sentence() -> None:
    for arguments, sentence in (
        ({"topology": "torus"}, "unknown topology 'torus'"),
        ({"taper": 0.5}, "taper must be at least 1"),
        ({"endpoints": 65_537}, "joins at most 65,536 endpoints, not 65,537"),
        ({"endpoints": 0}, "endpoints must be at least 1"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            Fabric(**{"topology": "fat-tree", "generation": NDR, "endpoints": 8} | arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="no whole hosts of 8"):
        ways(tree(12), "all_reduce", 1, per_host=8, links=LINKS)
    with pytest.raises(InvalidConfig, match="'send' is not computed"):
        ways(tree(16), "send", 1, per_host=8, links=LINKS)
    with pytest.raises(InvalidConfig, match="unknown rate 'edr'"):
        app(["comm", "network", "--rate", "edr"], standalone_mode=False)


def test_the_page_has_what_the_verb_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs/communication.md").read_text().replace("*", "")
    done = CliRunner().invoke(app, ["comm", "network", "--json"], catch_exceptions=False)
    record = json.loads(done.stdout)
    times = {(w["topology"], w["rate"], w["bytes"], w["op"]): w["ways"] for w in record["ways"]}
    rows = re.findall(
        r"\| (64 KiB|256 MiB) \| (fat tree|dragonfly) (\w+) \| (\S+) µs \| (\S+) \| (\S+) \| (\S+) \|", page
    )
    assert len(rows) == 4
    for size, topology, rate, *printed in rows:
        nbytes = {"64 KiB": 65_536, "256 MiB": 256 * MIB}[size]
        where = (topology.replace(" ", "-"), rate, nbytes)
        by_name = {way["name"]: way["total"] for way in times[*where, "all_reduce"]}
        (exchange,) = times[*where, "all_to_all"]
        told = [by_name["ring"], by_name["tree"], by_name["SHARP"], exchange["total"]]
        assert printed == [f"{1e6 * seconds:,.0f}" for seconds in told]
    switches = {(f["topology"], f["rate"]): f["switches"] for f in record["fabrics"]}
    assert (switches["fat-tree", "XDR"], switches["dragonfly", "NDR"]) == (math.ceil(3 * 1024 / 144), 64)
    text = CliRunner().invoke(app, ["comm", "network", "--rate", "ndr"]).stdout
    assert "1,024 devices in hosts of 8; arithmetic, not measured" in text
    assert "SHARP" in text
