"""What passes of a compiler changed, as it is read from MLIR's printouts."""

from __future__ import annotations

from ridgeline.kernels.base.passes import of_dump, plain

MODULE = "('builtin.module' operation) //----- //"
DUMP = f"""// -----// IR Dump Before First: first{{top-down=true}} {MODULE}
#loc = loc("x.py":1:0)
module {{
  tt.func @f(%arg0: i32 loc("n"(#loc))) {{
    %0 = arith.addi %arg0, %arg0 : i32 loc(#loc1)
    %1 = arith.addi %arg0, %arg0 : i32 loc(#loc2)
    tt.store %p, %1 : i32
  }}
}}
// -----// IR Dump Before Second: second {MODULE}
module {{
  tt.func @f(%arg0: i32) {{
    %7 = arith.addi %arg0, %arg0 : i32
    tt.store %p, %7 : i32
  }}
}}
// -----// IR Dump Before Each: of-functions ('llvm.func' operation: @f) //----- //
llvm.func @f() {{
}}
// -----// IR Dump Before Third: third {MODULE}
module {{
  tt.func @f(%x: i32) {{
    tt.store %p, %8 : i32
    %8 = arith.addi %x, %x : i32
  }}
}}
// -----// IR Dump Before Last: last {MODULE}
module {{
  tt.func @f(%x: i32) {{
    tt.store %p, %8 : i32
    %8 = arith.addi %x, %x : i32
  }}
}}
"""


def test_passes_that_changed_something() -> None:
    first, second = of_dump(DUMP)
    assert (first.number, first.name, first.added, first.removed) == (1, "first", {}, {"arith.addi": 1})
    assert first.lines == (0, 1)
    assert [line for line in first.diff(0) if line[0] in "+-"] == ["-    % = arith.addi %, % : i32"]
    assert (second.number, second.name) == (2, "second and of-functions")
    assert (second.added, second.removed, second.lines) == ({}, {}, (0, 0)), "lines that moved are no new ones"
    assert not list(of_dump(""))


def test_names_that_a_pass_gives_anew_are_left_out() -> None:
    before = '  %12:2 = "tt.reduce"(%3#1, %cst) : (tensor<64xf32, #blocked3>) -> f32 loc(callsite(#loc5 at #loc7))'
    assert plain(before) == ['  % = "tt.reduce"(%, %) : (tensor<64xf32, #blocked>) -> f32']
