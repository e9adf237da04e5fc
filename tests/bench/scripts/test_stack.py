"""What is read of Inductor's code, of HLO and of graph breaks, and the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline_bench.scripts.stack import hlo, page
from ridgeline_bench.scripts.stack.graph_breaks import CALLS, _frexp, line_of
from ridgeline_bench.scripts.stack.modes import GeneratedCode
from ridgeline_bench.scripts.stack.page import breaks, modes
from ridgeline_bench.scripts.stack.recompiles import bucket, measured

CODE = """
triton_red_fused_add_mean_0 = async_compile.triton('triton_red_fused_add_mean_0', '''
    def triton_red_fused_add_mean_0(x): ...
''', device_str='cuda')
cpp_fused_silu_1 = async_compile.cpp_pybinding(['float*'], '''...''')

def call(args):
        triton_red_fused_add_mean_0.run(arg0, buf0, stream=stream0)
        extern_kernels.mm(buf0, arg1, out=buf1)
        extern_kernels.mm(buf1, arg2, out=buf2)
        cpp_fused_silu_1(buf2)
        triton_red_fused_add_mean_0.run(buf2, buf3, stream=stream0)
        buf4 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf3)
"""


def test_kernels_launches_and_calls_are_read_from_inductor_s_code() -> None:
    found = GeneratedCode.read([CODE])
    assert found.kernels == {"triton_red_fused_add_mean_0": "reduction", "cpp_fused_silu_1": "C++"}
    assert found.launches == 3
    assert found.calls == {"mm": 2, "_scaled_dot_product_flash_attention.default": 1}


HLO = """HloModule jit_f

%fused_computation (p: f32[4], q: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %m = f32[4]{0} multiply(%p, %q)
  ROOT %a = f32[4]{0} add(%m, %q), metadata={op_name="jit(f)/add"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = (f32[4]{0}, s32[]) custom-call(%x)
  ROOT %f = f32[4]{0} fusion(%x, %x), kind=kLoop, calls=%fused_computation
}
"""


def test_instructions_fusions_and_layouts_are_read_from_hlo() -> None:
    assert hlo.opcodes(HLO) == {"parameter": 3, "multiply": 1, "add": 1, "custom-call": 1, "fusion": 1}
    assert hlo.fusions(HLO) == [["multiply", "add"]]
    assert hlo.layouts(HLO) == ["{0}"]


def test_passes_that_changed_a_module_are_those_behind_which_its_text_differs(tmp_path: Path) -> None:
    said = (
        ("0001.simplify.after_pipeline-start", "a"),
        ("0002.simplify.after_algsimp", "b"),
        ("0003.simplify.after_dce", "b"),
        ("0010.fusion.after_fusion", "c"),
    )
    for name, text in said:
        (tmp_path / f"module_0001.jit_f.cpu.{name}.before_next.txt").write_text(text)
    assert list(hlo.changes(tmp_path)) == [("simplify", "algsimp"), ("fusion", "fusion")]


@pytest.mark.thorough
def test_a_class_that_breaks_does_not_behind_its_cure() -> None:
    line = line_of("flaubert")
    assert (line["graphs"], line["breaks"], line["breaks_left"]) == (2, 1, 0)
    assert any("item" in reason for reason in line["reasons"].values())


def test_at_least_twenty_classes_are_called() -> None:
    assert len({name.partition(",")[0] for name in CALLS}) >= 20


def test_the_cure_of_i_bert_computes_what_numpy_did() -> None:
    quant = pytest.importorskip("transformers.models.ibert.quant_modules")
    x = torch.tensor([[0.3, 1e-7, 5.0], [2.0, 77.7, 1.0]], dtype=torch.float64)
    for got, want in zip(_frexp(x), quant.batch_frexp(x), strict=True):
        torch.testing.assert_close(got.float(), want.float())


def test_lengths_are_filled_up_to_powers_of_two_and_symbols_need_one_graph() -> None:
    assert [bucket(n) for n in (1, 8, 9, 33, 64)] == [8, 8, 16, 64, 64]
    found = {
        way: measured(way, "eager", [3, 5, 7, 9])["graphs"] for way in ("static", "automatic", "symbolic", "buckets")
    }
    assert found == {"static": 4, "automatic": 2, "symbolic": 1, "buckets": 2}


def test_a_mode_that_loses_to_torch_is_named() -> None:
    common: dict[str, object] = {
        "case": "a", "machine": {"gpu": "G", "torch": "2"}, "date": "2026-11-29T00:00:00",
    }  # fmt: skip
    lines = [
        {**common, "mode": "torch", "ms": 1.0},
        {**common, "mode": "default", "ms": 2.0, "first_s": 3.0},
        {**common, "mode": "reduce-overhead", "ms": 0.5, "first_s": 4.0},
    ]
    assert modes(lines)[-2] == "| a | 1.000 | 2.000 | **0.500** | - | 3.0, 4.0 | default |"
    line = {"model": "m", "graphs": 1, "breaks": 0, "reasons": {}}
    assert breaks([line])[-2] == "| m | 1 | 0 | - | - | - | - |"


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page(text, page.results()) == text
