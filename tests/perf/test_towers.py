"""The work of towers, beside what torch counts of transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.models import model_config
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import Roofline, step_limit, step_ops
from ridgeline.perf.towers import tower_ops
from tests.models import vision_configs
from tests.vision import tiny

UNCOUNTED = ("norm", "activation", "rope")  # by torch, which counts products


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "chameleon"])
def test_operations_of_products_are_those_of_transformers_tower(family: str) -> None:
    oracle, pictures = tiny.build(family), [tiny.drawn(family, number) for number in range(2)]
    architecture = f"{tiny.FAMILIES[family].name}ForConditionalGeneration"
    tower = model_config({**oracle.config.to_dict(), "architectures": [architecture]}).spec.tower
    assert tower is not None
    with FlopCounterMode(display=False) as counter:
        oracle.model.get_image_features(**tiny.inputs(family, pictures))
    counts = counter.get_flop_counts()["Global"]
    theirs = sum(flops for op, flops in counts.items() if "attention" not in str(op) and "bmm" not in str(op))
    side = tiny.FAMILIES[family].patching.rows
    views = [each.shape[0] * each.shape[1] // side**2 for each in pictures]
    ops = list(tower_ops(tower, views, precision("float32")))
    ours = sum(op.count * op.cost.flops for op in ops if not any(name in op.name for name in (*UNCOUNTED, "attention")))
    unused = 1.5 if family == "llava" else 1.0  # transformers runs all three layers, of which the last is not used
    biases = 1 + 1 / (2 * 32)  # torch leaves them out: one operation of a product of 32 numbers or more
    assert theirs / unused <= ours <= theirs * biases


def test_windows_leave_attention_out() -> None:
    tower = model_config(vision_configs.QWEN2_5_VL_7B).spec.tower
    assert tower is not None
    ops = [op for op in tower_ops(tower, [4096], precision("bfloat16")) if "attention" in op.name]
    width, heads = 80, 16
    assert {(op.count, op.cost.flops) for op in ops} == {
        (4, 4.0 * width * heads * 4096**2),
        (28, 4.0 * width * heads * 4096 * 64),
    }


def test_a_step_with_pictures_takes_the_towers_time_more() -> None:
    model, hardware = model_config(vision_configs.QWEN3_VL_8B).spec, find("H200")
    plain = StepShape([262, 1], [262, 900], 2)
    ops = step_ops(model, plain._replace(views=(1024, 256)), dtype="bfloat16")
    assert ops[0].name.startswith("tower.")
    roofline = Roofline(model, hardware, "bfloat16")
    wanted = step_limit(ops, hardware, "bfloat16")
    assert roofline.step_limit(plain._replace(views=(1024, 256))) == pytest.approx(wanted, rel=1e-6)
    assert 1.2e-3 < wanted - roofline.step_limit(plain) < 3e-3  # 1.2 TFLOP at 750 to 990 TFLOP/s


def test_keys_of_pictures_are_made_once_beside_the_tower() -> None:
    """Of four tiles in eight layers. A picture of one tile takes as much of the tower's time."""
    model, hardware = model_config(vision_configs.LLAMA_3_2_11B_VISION).spec, find("H200")
    plain = StepShape([64, 1], [64, 900], 2)
    seen = plain._replace(views=(1600,) * 4)
    found = step_ops(model, seen, dtype="bfloat16")
    ops = {op.name: op for op in found}
    assert (ops["tower.kv"].count, ops["tower.kv"].cost.flops) == (8, 2.0 * 6404 * 4096 * 2 * 8 * 128)
    one = {op.name: op for op in step_ops(model, plain._replace(views=(1600,)), dtype="bfloat16")}
    assert one["tower.packed_attention"] == ops["tower.packed_attention"]
    wanted = step_limit(found, hardware, "bfloat16")
    assert Roofline(model, hardware, "bfloat16").step_limit(seen) == pytest.approx(wanted, rel=1e-6)


def test_a_plan_has_the_towers_time_in_ttft_and_in_rates() -> None:
    model, hardware = model_config(vision_configs.QWEN3_VL_8B).spec, find("H200")
    words = Deployment(model=model, hardware=hardware, input=262, output=128)
    plain, seen = Plan(words), Plan(replace(words, views=(1024,)))
    tower = step_limit(list(tower_ops(model.tower, [1024], precision("bfloat16"))), hardware, "bfloat16")
    assert seen.seeing == pytest.approx(tower)
    for batch in (1, 32):
        a, b = plain.point(batch), seen.point(batch)
        assert b.ttft - a.ttft == pytest.approx(tower)
        assert batch * 128 / b.tokens_per_second - batch * 128 / a.tokens_per_second == pytest.approx(batch * tower)
    assert sum(seen.shares) == pytest.approx(1)
    assert seen.shares[0] / seen.shares[1] == pytest.approx(tower / plain.divided.busy(262))
    assert plain.shares[0] == 0
    with pytest.raises(InvalidConfig, match="this model has none"):
        replace(words, model=replace(model, tower=None), views=(1024,))
