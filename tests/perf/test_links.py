"""Lines through measured collectives, and what stands in for them until somebody measures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.hardware import KNOWN, find
from ridgeline.perf.links import OPS, Line, Links, assumed, bus_factor, fit, load_links, save_links

ALPHA, BETA = 17e-6, 1 / 360e9
SIZES = [1 << n for n in range(10, 31, 2)]


def test_a_line_is_found_again_in_spite_of_noise_and_of_points_far_off() -> None:
    draw = random.Random(0)
    points = [(n, (ALPHA + BETA * n) * (1 + draw.uniform(-0.03, 0.03))) for n in SIZES]
    clean = fit("all_reduce", "nccl", 2, points)
    assert clean.alpha == pytest.approx(ALPHA, rel=0.03)
    assert clean.beta == pytest.approx(BETA, rel=0.03)
    assert clean.error < 0.03
    assert clean.worst < 0.05
    disturbed = [(n, {2: 6.0, 5: 0.2, 8: 0.3}.get(index, 1.0) * t) for index, (n, t) in enumerate(points)]
    robust = fit("all_reduce", "nccl", 2, disturbed)
    assert robust.alpha == pytest.approx(ALPHA, rel=0.06)
    assert robust.beta == pytest.approx(BETA, rel=0.06)
    assert robust.worst > 0.5, "and it says that points lie far off"
    assert robust.error < 0.05
    assert (robust.points, robust.largest) == (len(SIZES), SIZES[-1])


def test_neither_part_of_a_line_is_negative() -> None:
    through_zero = fit("send", "nccl", 2, [(n, 1e-9 * n - 1e-7) for n in (1000, 2000, 4000)])
    assert through_zero.alpha == 0.0
    assert through_zero.beta > 0
    flat = fit("send", "nccl", 2, [(1000, 3e-6), (2000, 2.9e-6), (4000, 2.8e-6)])
    assert flat.beta == 0.0
    assert flat.alpha == pytest.approx(2.9e-6, rel=0.03)
    with pytest.raises(InvalidConfig, match="at least two sizes"):
        fit("send", "nccl", 2, [(1000, 3e-6)])


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(op, 8) for op in OPS] == [1.75, 0.875, 0.875, 0.875, 1.0]


def line(op: str = "all_reduce", backend: str = "nccl", ranks: int = 2, **more: float) -> Line:
    return Line(op, backend, ranks, **{"alpha": 1e-5, "beta": 1e-11, "largest": 1e9, **more})


def test_the_engines_fastest_way_counts_as_far_as_it_goes() -> None:
    ours = line(backend="ours", alpha=4e-6, beta=1e-10, largest=1000)
    others = line(backend="nccl-ring-ll", alpha=1e-9)  # the engine does not go this way
    links = Links(device="test", lines=(line(), ours, others), source="")
    assert links.seconds("all_reduce", 2, 1000) == pytest.approx(4e-6 + 1e-7)
    assert links.seconds("all_reduce", 2, 2000) == pytest.approx(1e-5 + 2e-8)
    assert links.seconds("all_reduce", 1, 2000) == 0.0
    with pytest.raises(InvalidConfig, match="nothing is known of send on test"):
        links.seconds("send", 2, 1)


def test_other_numbers_of_ranks_keep_the_bus_bandwidth() -> None:
    links = Links(device="test", lines=(line(beta=1 / 400e9),), source="")
    (four,) = links.of("all_reduce", 4)
    assert four.bus == pytest.approx(400e9)
    assert four.alpha == pytest.approx(2e-5), "twice the steps of a tree"
    ours = line(backend="ours").scaled(4)
    assert (ours.alpha, ours.beta) == (1e-5, pytest.approx(3e-11)), "all is sent to three others"
    measured = line(ranks=4, alpha=1.0)
    assert Links(device="test", lines=(line(), measured), source="").of("all_reduce", 4) == [measured]


def test_what_is_assumed_says_so_and_knows_every_op_of_every_device() -> None:
    for hardware in KNOWN:
        links = assumed(hardware)
        assert "assumed" in links.source
        for op in OPS:
            assert links.seconds(op, 2, 1e9) * hardware.interconnect > bus_factor(op, 2) * 1e9, "not beyond the link"
    two = assumed(find("H200"))
    for kib, measured in ((1, 1.55), (16, 1.83), (64, 2.12), (256, 3.20), (1024, 8.6), (8192, 32.5)):  # on two H200s
        assert 1e6 * two.seconds("all_reduce", 2, kib << 10) == pytest.approx(measured, rel=0.1)
    for op, mib, measured in (("all_reduce", 64, 249), ("all_gather", 64, 159), ("all_to_all", 256, 478)):
        assert 1e6 * two.seconds(op, 2, mib << 20) == pytest.approx(measured, rel=0.15)
    four = two.of("all_reduce", 4)
    assert [each.backend for each in four] == ["nccl", "ours"], "direct sums are those of two ranks"
    assert four[1].largest == 256 << 10


def test_lines_are_kept_beside_those_of_others_and_damage_is_one_sentence(tmp_path: Path) -> None:
    assert load_links("NVIDIA H200", tmp_path) is None
    first = Links(device="NVIDIA H200", lines=(line(), line("send")), source="a", date="2026-11-22", link="NV18")
    path = save_links(first, tmp_path)
    assert load_links("NVIDIA H200", tmp_path) == first
    again = Links(device="NVIDIA H200", lines=(line(alpha=2e-5), line(ranks=4)), source="b")
    save_links(again, tmp_path)
    kept = load_links("NVIDIA H200", tmp_path)
    assert kept is not None
    assert set(kept.lines) == {line("send"), *again.lines}
    text = path.read_text()
    for wrong in ("{}", text.replace("2e-05", "-1"), text.replace('"ranks": 4', '"ranks": 1'), text[:50]):
        path.write_text(wrong)
        with pytest.raises(InvalidConfig, match="is damaged"):
            load_links("NVIDIA H200", tmp_path)
