"""Tuned cuts: which file counts, and what decides where none does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.tuned import GpuKind, ShapeClass
from ridgeline.kernels.gemm.plain import triton as plain
from ridgeline.kernels.gemm.plain.choose import LibraryProduct, RowsPlan, Stream, choose, fits
from ridgeline.kernels.ops import OPS

H200, SHAPE = GpuKind((9, 0), 132), ShapeClass("", (8, 4096, 6144))
STREAM, OTHER = Stream(64, 16, 128, 7), Stream(128, 16, 64, 5)
KINDS = (RowsPlan, Stream, LibraryProduct)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file that ships for an H200, which does not exist yet; nor does the user's own."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_IGNORED", [])
    tuned.forget()
    return tmp_path / "shipped" / "sm_90x132.jsonl"


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    tuned.forget()


def line(cut: Any, shape: ShapeClass = SHAPE, op: str = "linear") -> dict[str, Any]:
    return {"op": op, "form": shape.form, "sizes": list(shape.sizes), "cut": tuned.described(cut), "us": 13.0}


def found(shape: ShapeClass = SHAPE, gpu: GpuKind = H200) -> Any:
    return tuned.tuned("linear", shape, gpu, *KINDS)


def test_a_cut_that_was_written_is_found_again_for_its_gpu_and_class_alone(shipped: Path) -> None:
    tuned.write(shipped, [line(STREAM), line(LibraryProduct(), ShapeClass("", (64, 64, 64)))])
    assert found() == STREAM
    assert found(ShapeClass("", (64, 64, 64))) == LibraryProduct()
    assert found(ShapeClass("gate", SHAPE.sizes)) is None
    assert found(gpu=GpuKind((9, 0), 114)) is None
    assert found(gpu=GpuKind((0, 0), 4)) is None


def test_the_users_own_file_goes_before_the_one_that_ships(shipped: Path) -> None:
    tuned.write(shipped, [line(STREAM), line(STREAM, ShapeClass("", (1, 1, 1)))])
    tuned.write(tuned.path_of(H200), [line(OTHER)])
    assert found() == OTHER
    assert found(ShapeClass("", (1, 1, 1))) == STREAM


def test_null_leaves_the_choice_to_the_rule(shipped: Path) -> None:
    tuned.write(shipped, [line(STREAM)])
    tuned.write(tuned.path_of(H200), [line(None)])
    assert found() is None
    assert tuned.knows("linear", SHAPE, H200)


def test_writing_replaces_lines_of_the_same_class(shipped: Path) -> None:
    tuned.write(shipped, [line(STREAM), line(STREAM, op="norm_linear")])
    tuned.write(shipped, [line(OTHER)])
    lines = [json.loads(text) for text in shipped.read_text().splitlines()]
    assert [(each["op"], each["cut"]["rows"]) for each in lines] == [("linear", 128), ("norm_linear", 64)]


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"op": "linear"}', '{"op": "linear", "form": "", "sizes": 3, "cut": 1}', "[" * 100_000,
        '{"op": "linear", "form": "", "sizes": [Infinity], "cut": null}', " " * (tuned.LARGEST + 1),
    ],
    ids=range(7),
)  # fmt: skip
def test_a_file_of_something_else_is_named(shipped: Path, text: str) -> None:
    own = tuned.path_of(H200)
    own.parent.mkdir(parents=True)
    own.write_text(text)
    with pytest.raises(InvalidConfig, match=r"sm_90x132\.jsonl is no file of tuned cuts"):
        found()


@pytest.mark.parametrize(
    "cut",
    [
        {"kind": "Strome"}, {"kind": "Stream", "rows": 64}, {"kind": "LibraryProduct", "x": 1}, {}, 1, "Stream", [],
        tuned.described(STREAM) | {"rows": "64"}, tuned.described(STREAM) | {"promote": 1},
        tuned.described(STREAM) | {"stages": -1}, tuned.described(STREAM) | {"stages": 1 << 40},
        tuned.described(STREAM) | {"split": True}, tuned.described(STREAM) | {"stages": 7.0},
    ],
)  # fmt: skip
def test_a_cut_of_another_version_is_refused(shipped: Path, cut: Any) -> None:
    tuned.write(shipped, [line(STREAM) | {"cut": cut}])
    with pytest.raises(InvalidConfig, match="which does not fit this version; tune again, or delete "):
        found()


def test_a_product_on_hopper_takes_the_tuned_cut(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.empty(6, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(6144, 4096, device="meta")
    monkeypatch.setattr(plain, "_hopper", lambda device: 132)
    rule = choose(6, 4096, 6144, hopper=132)
    assert plain._plan(x, weight) == rule != OTHER
    tuned.write(shipped, [line(OTHER)])
    assert plain._plan(x, weight) == OTHER
    assert plain._plan(x, weight, adapters=True) != OTHER
    assert plain._plan(x[:3], weight) != OTHER
    monkeypatch.setattr(plain, "_hopper", lambda device: 0)
    assert plain._plan(x, weight) != OTHER


@pytest.mark.parametrize(
    "cut",
    [
        RowsPlan(2, 4, 4096, 4), RowsPlan(2, 8, 1024, 4, programs=2), RowsPlan(2, 8, 1000, 4), RowsPlan(0, 8, 1024, 4),
        Stream(64, 16, 128, 40), Stream(96, 16, 128, 4), Stream(128, 24, 128, 4), Stream(64, 16, 128, 7, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_cut_that_would_leave_results_out_or_lacks_memory_is_refused(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, cut: Any
) -> None:
    x, weight = torch.empty(6, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(6144, 4096, device="meta")
    monkeypatch.setattr(plain, "_hopper", lambda device: 132)
    tuned.write(tuned.path_of(H200), [line(cut)])
    with pytest.raises(InvalidConfig, match="does not fit this version"):
        plain._plan(x, weight)


def test_a_launch_reads_no_file_for_a_shape_that_it_had_before(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.empty(6, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(6144, 4096, device="meta")
    asked = list[str]()
    monkeypatch.setattr(plain, "tuned", lambda op, *_, **__: asked.append(op))
    monkeypatch.setattr(plain, "_hopper", lambda device: 132)
    tuned.forget()
    assert plain._plan(x, weight) == plain._plan(x, weight) == choose(6, 4096, 6144, hopper=132)
    assert asked == ["linear"]
    tuned.forget()
    plain._plan(x, weight)
    assert asked == ["linear", "linear"]


def test_processes_that_write_at_once_keep_all_lines(shipped: Path) -> None:
    def some(first: int) -> None:
        for tokens in range(first, first + 40):
            tuned.write(shipped, [line(STREAM, ShapeClass("", (tokens, 64, 64)))])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(some, range(0, 160, 40)))
    lines = [json.loads(text) for text in shipped.read_text().splitlines()]
    assert {each["sizes"][0] for each in lines} == set(range(160))


@pytest.mark.parametrize("path", sorted(tuned.SHIPPED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_cuts_that_ship_are_known_and_fit_a_program(path: Path) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert lines
    for each in lines:
        cuts = OPS[each["op"]].cuts()
        assert cuts is not None
        assert cuts.tuning is not None
        kinds = {kind.__name__: kind for kind in cuts.tuning.kinds}
        cut = each["cut"]
        made = None if cut is None else kinds[cut.pop("kind")](**cut)
        if each["op"] in ("linear", "norm_linear") and made is not None:
            tokens, inputs, _ = each["sizes"]
            assert fits(made, tokens, inputs, gated="gate" in each["form"])
        assert 0 < each["us"] <= 1.01 * (each["before_us"] or each["us"])
