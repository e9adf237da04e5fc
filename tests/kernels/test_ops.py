"""An op's reference says how it is called, and every implementation can be called so."""

from __future__ import annotations

import inspect
from inspect import Parameter

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Implementation, Op, Platform
from ridgeline.kernels.ops import DETERMINISTIC, OPS, Ops

HERE = Platform(device_type="cpu")
IMPLEMENTED = [
    pytest.param(op, implementation, id=f"{name}-{implementation.name}")
    for name, op in OPS.items()
    for implementation in op.implementations
]
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def parameters(function: object) -> dict[str, Parameter]:
    return dict(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "implementation"), IMPLEMENTED)
def test_an_implementation_takes_what_the_reference_takes(op: Op, implementation: Implementation) -> None:
    """By the same names and in the same order, with the same defaults; what it takes beside that has defaults."""
    if implementation.name in ("triton", "batch_invariant", "triton_training"):
        pytest.importorskip("triton")
    wanted, taken = parameters(op.reference), parameters(implementation.load())
    if implementation.target.startswith("torch.nn.functional:"):  # positions are torch's to name
        assert len([p for p in taken.values() if p.default is Parameter.empty]) == len(wanted)
        return
    in_order = [name for name, p in wanted.items() if p.kind in POSITIONAL]
    assert [name for name, p in taken.items() if p.kind in POSITIONAL][: len(in_order)] == in_order
    for name, parameter in wanted.items():
        assert taken[name].default == parameter.default, name
    assert all(p.default is not Parameter.empty for name, p in taken.items() if name not in wanted)


def test_ops_are_listed_once_under_their_own_names() -> None:
    assert OPS
    assert all(op.name == name for name, op in OPS.items())
    assert set(Ops(HERE).chosen) == set(OPS)


def test_an_instance_holds_the_functions_chosen_for_it() -> None:
    first, second = Ops(HERE, {"linear": "reference"}), Ops(HERE, {"linear": "torch"})
    assert first.linear is OPS["linear"].reference
    assert first.chosen["linear"] == "reference"
    assert second.linear is OPS["linear"].implementations[2].load()
    assert "linear" in vars(first), "no later call looks for it again"
    assert not vars(first).keys() & (OPS.keys() - {"linear"}), "what no model has asked for is not imported"
    assert all(callable(getattr(first, name)) for name in OPS)
    assert Ops.linear is OPS["linear"]


def test_an_op_behind_a_norm_follows_the_op_alone() -> None:
    assert Ops(HERE, {"coded_linear": "torch"}).chosen["coded_norm_linear"] == "torch"
    both = {"coded_linear": "torch", "coded_norm_linear": "reference"}
    assert both.items() <= Ops(HERE, both).chosen.items()


def test_what_is_deterministic_is_read_off_the_ops() -> None:
    assert {"linear", "norm_linear", "decode_attention", "sample"} <= set(DETERMINISTIC)
    gpu = Platform(device_type="cuda", arch="sm_90")
    for name, implementation in DETERMINISTIC.items():
        assert OPS[name].chosen(gpu, implementation) == implementation
        assert OPS[name].chosen(gpu) != implementation, "nobody gets it unasked"


@pytest.mark.parametrize(("overrides", "complaint"), [({"linaer": "torch"}, "linaer"), ({"linear": "int8"}, "int8")])
def test_names_that_do_not_exist_are_refused(overrides: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"{complaint}.*known:"):
        Ops(HERE, overrides)
