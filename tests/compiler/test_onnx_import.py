"""ONNX models read into the compiler: operators, a chain and whole decoders make what ONNX Runtime makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper, save, shape_inference
from torch import nn

from ridgeline.compiler import mlir
from ridgeline.compiler.onnx_import import OPERATORS, OnnxFunction, compile_onnx, traced
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.onnx_families import write
from ridgeline_bench.scripts.onnx_network import empty_past, export, open_network

if why := mlir.available():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("llvmlite")

Array = NDArray[Any]
DRAWN = np.random.default_rng(0)
X, Y, Z = (DRAWN.normal(size=size).astype(np.float32) for size in ((2, 3, 4), (2, 3, 4), (4, 5)))
POSITIVE, TRUTH, WHOLE = np.abs(X) + 0.1, X > 0, DRAWN.integers(-9, 9, (2, 3, 4))
W, B = (DRAWN.normal(size=size).astype(np.float32) for size in ((4,), (4,)))
Q, K = (DRAWN.normal(size=size).astype(np.float32) for size in ((2, 4, 3, 8), (2, 2, 5, 8)))
FLAT_Q, FLAT_K = (DRAWN.normal(size=size).astype(np.float32) for size in ((2, 3, 32), (2, 3, 16)))


def whole(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


CASES: list[tuple[str, list[Array], list[Array], dict[str, Any]]] = [
    # operator, inputs, constants behind them, attributes
    *((name, [X, Y], [], {}) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Greater", "Less", "Equal")),
    *((name, [X, Y], [], {}) for name in ("GreaterOrEqual", "LessOrEqual")),
    *((name, [X], [], {}) for name in ("Exp", "Neg", "Abs", "Reciprocal", "Sin", "Cos", "Tanh", "Erf", "Sigmoid")),
    *((name, [X], [], {}) for name in ("Relu", "Softplus", "IsNaN", "Identity", "Shape", "Dropout", "Gelu", "Flatten")),
    *((name, [POSITIVE], [], {}) for name in ("Sqrt", "Log")),
    ("And", [TRUTH, X < 1], [], {}), ("Or", [TRUTH, X < 1], [], {}), ("Not", [TRUTH], [], {}),
    ("Div", [WHOLE, np.abs(WHOLE) + 1], [], {}), ("Where", [TRUTH, X, Y], [], {}),
    ("Pow", [POSITIVE, Y], [], {}), ("Pow", [X], [np.array(2, np.float32)], {}),
    ("Mul", [X], [np.array(0.3, np.float32)], {}), ("Gelu", [X], [], {"approximate": "tanh"}),
    ("Clip", [X], [np.array(-0.5, np.float32), np.array(0.5, np.float32)], {}),
    ("Softmax", [X], [], {"axis": 1}), ("Softmax", [X], [], {}),
    ("ReduceMean", [X], [whole(-1)], {}), ("ReduceMean", [X], [], {}),
    ("ReduceSum", [X], [whole(0, 2)], {"keepdims": 0}),
    ("ReduceMax", [X], [whole(1)], {}), ("ReduceMin", [X], [whole(-1)], {"keepdims": 0}),
    ("ReduceSum", [X], [], {"noop_with_empty_axes": 1}),
    ("LayerNormalization", [X, W, B], [], {"epsilon": 1e-3}), ("LayerNormalization", [X, Y[0], Y[1]], [], {"axis": 1}),
    ("RMSNormalization", [X, W], [], {"epsilon": 1e-3}),
    ("MatMul", [X, Z], [], {}), ("Gemm", [X[0], Z, Z[0]], [], {"alpha": 0.5, "beta": 2.0}),
    ("Gemm", [Z, X[0]], [], {"transA": 1, "transB": 1}),
    ("Attention", [Q, K, K[:, :, :, :6].copy()], [], {"scale": 0.3}),
    ("Attention", [Q, K, K, DRAWN.random((3, 5)) > 0.3], [], {}),
    ("Attention", [FLAT_Q, FLAT_K, FLAT_K], [], {"is_causal": 1, "q_num_heads": 4, "kv_num_heads": 2}),
    ("Reshape", [X], [whole(0, -1)], {}), ("Transpose", [X], [], {}), ("Transpose", [X], [], {"perm": [0, 2, 1]}),
    ("Concat", [X, Y], [], {"axis": -1}), ("Slice", [X], [whole(-3, 0), whole(9, 1), whole(2, 0)], {}),
    ("Slice", [X], [whole(-1), whole(-99), whole(2), whole(-2)], {}),
    ("Unsqueeze", [X], [whole(0, -1)], {}), ("Squeeze", [X[:, :1]], [whole(1)], {}), ("Squeeze", [X[:1, :1]], [], {}),
    ("Expand", [X[:, :1]], [whole(3, 1)], {}), ("Tile", [X], [whole(1, 2, 3)], {}),
    ("Gather", [X, np.array([[0, -1], [2, 1]])], [], {"axis": 1}),
    ("GatherND", [X, np.array([[[0, 2]], [[1, -1]]])], [], {}),
    ("Cast", [X], [], {"to": TensorProto.INT64}), ("Cast", [WHOLE], [], {"to": TensorProto.FLOAT}),
    ("Trilu", [X], [np.array(1)], {}), ("Trilu", [X], [], {"upper": 0}),
]  # fmt: skip


def model_of(
    op: str, inputs: list[Array], constants: list[Array], attributes: dict[str, Any], outputs: int = 1
) -> ModelProto:
    """A model of one node."""
    given = [f"x{n}" for n in range(len(inputs))]
    known = [f"c{n}" for n in range(len(constants))]
    node = helper.make_node(op, [*given, *known], [f"y{n}" for n in range(outputs)], **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in zip(given, inputs, strict=True)
        ],
        [helper.make_empty_tensor_value_info(f"y{n}") for n in range(outputs)],
        [numpy_helper.from_array(x, n) for n, x in zip(known, constants, strict=True)],
    )
    return inferred(graph)


def inferred(graph: GraphProto) -> ModelProto:
    """The model of a graph whose outputs get their types from its nodes."""
    return shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    )


def compared(file: Path, inputs: list[Array]) -> None:
    session = onnxruntime.InferenceSession(str(file))
    want = session.run(None, {each.name: x for each, x in zip(session.get_inputs(), inputs, strict=True)})
    tensors = [torch.from_numpy(x) for x in inputs]
    got = compile_onnx(file, *tensors)(*tensors)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-6)
        assert mine.numpy().dtype == theirs.dtype


@pytest.mark.parametrize(("op", "inputs", "constants", "attributes"), CASES)
def test_an_operator_makes_what_onnx_runtime_makes(
    op: str, inputs: list[Array], constants: list[Array], attributes: dict[str, Any], tmp_path: Path
) -> None:
    save(model_of(op, inputs, constants, attributes), tmp_path / "one.onnx")
    compared(tmp_path / "one.onnx", inputs)


def test_every_operator_has_a_case() -> None:
    elsewhere = {"Split", "Range", "Constant", "ConstantOfShape"}  # below, and in decoders
    assert {op for op, *_ in CASES} == OPERATORS.keys() - elsewhere
    assert not elsewhere - OPERATORS.keys()


def test_a_split_and_sizes_made_of_shapes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=2),
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.array(1))),
        helper.make_node("Squeeze", ["sizes"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["counts"]),
        helper.make_node("ConstantOfShape", ["sizes"], ["twos"], value=numpy_helper.from_array(np.array([2]))),
        helper.make_node("Mul", ["counts", "twos"], ["even"]),
        helper.make_node("Cast", ["even"], ["added"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "added"], ["sum"]),
        helper.make_node("Split", ["sum"], ["a", "b", "c"], axis=2, num_outputs=3),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "m"])
    graph = helper.make_graph(nodes, "sizes", [given], [helper.make_empty_tensor_value_info(n) for n in "abc"])
    save(inferred(graph), tmp_path / "m.onnx")
    for x in (np.ones((2, 3, 5), np.float32), np.ones((1, 3, 8), np.float32)):
        compared(tmp_path / "m.onnx", [x])


def test_a_network_of_torch_is_read_and_its_chains_are_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1)).eval()
    x, file = torch.randn(5, 8), tmp_path / "net.onnx"
    torch.onnx.export(net, (x,), str(file), dynamo=True, opset_version=18, verbose=False)
    program = compile_onnx(file, x)
    assert program.num_kernels == 2  # the activation with the norm, and the softmax
    torch.testing.assert_close(program(x)[0], net(x))


@pytest.mark.dealt
@pytest.mark.parametrize(("family", "opset"), [("llama", 23), ("gpt2", 18)])
def test_a_decoder_that_was_exported_comes_back(family: str, opset: int, tmp_path: Path) -> None:
    write(family, tmp_path)
    network, file = open_network(tmp_path, 16), tmp_path / "decoder.onnx"
    export(network, file, opset)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(320, (2, 3), generator=generator)
    past = [torch.randn(x.shape, generator=generator) for x in empty_past(network.decoder.spec, 2, 5)]
    program = compile_onnx(file, ids, *past)
    assert program.num_kernels > 0
    for got, want in zip(program(ids, *past), network(ids, past), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_is_not_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(b"\x08\xff no model")
    with pytest.raises(InvalidConfig, match="no ONNX model"):
        OnnxFunction(file)
    with pytest.raises(InvalidConfig, match="no ONNX model"):
        OnnxFunction(tmp_path / "absent.onnx")
    save(model_of("NonZero", [X], [], {}), file)
    with pytest.raises(InvalidConfig, match=r"the operator NonZero is not read; known: Abs, Add"):
        OnnxFunction(file)
    save(model_of("Dropout", [X], [], {}, outputs=2), file)
    with pytest.raises(InvalidConfig, match="Dropout with 2 outputs"):
        compile_onnx(file, torch.from_numpy(X))
    save(model_of("Reshape", [X, whole(-1)], [], {}), file)
    with pytest.raises(InvalidConfig, match="from an input's numbers"):
        compile_onnx(file, torch.from_numpy(X), torch.tensor([-1]))
    save(model_of("Reshape", [X], [whole(7)], {}), file)
    with pytest.raises(InvalidConfig, match="Reshape of 'y0' cannot be computed"):
        compile_onnx(file, torch.from_numpy(X))
    with pytest.raises(InvalidConfig, match="takes 1 inputs, got 0"):
        compile_onnx(file)
    with pytest.raises(InvalidConfig, match=r"'x0' is of torch.float32, got torch.float64"):
        compile_onnx(file, torch.zeros(2, 3, 4, dtype=torch.float64))
    with pytest.raises(InvalidConfig, match=r"shape \[2, 3, 4\] \(None: any\), got \[1\]"):
        compile_onnx(file, torch.zeros(1))
    save(model_of("ConstantOfShape", [], [whole(1 << 20, 1 << 20)], {}), file)
    with pytest.raises(InvalidConfig, match="makes a constant of 4398046511104 bytes"):
        compile_onnx(file)
    for parts in (0, 1 << 30):
        with pytest.raises(InvalidConfig, match=f"Split into {parts} parts"):
            OPERATORS["Split"]([torch.from_numpy(X)], {"num_outputs": parts})
    model = model_of("Abs", [X], [], {})
    model.opset_import[0].version = 12
    save(model, file)
    with pytest.raises(InvalidConfig, match="of opset 12; opsets 13 to 23"):
        OnnxFunction(file)


def test_what_depends_on_constants_alone_is_computed_once(tmp_path: Path) -> None:
    save(model_of("Expand", [X[:, :1]], [whole(3, 1)], {}), tmp_path / "m.onnx")
    graph = traced(OnnxFunction(tmp_path / "m.onnx"), torch.from_numpy(X[:, :1])).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
