"""Adapters beside weights in NF4: their gradients are PEFT's in float64 on the same numbers, and no weight is ever
there in more bits but for its own product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.gemm.codes.op import TABLES, Coded
from ridgeline.layers.dense import PackedCausal
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.frozen import FrozenWeight
from ridgeline.training import base
from ridgeline.training import lora as lora_module
from ridgeline.training.base import held_bytes, opened
from ridgeline.training.lora import LearntWeight, Lora, LoraConfig, ThinMap
from ridgeline.training.tuned import PackRunner, recompute
from ridgeline.weights.loader import read_model_config
from ridgeline.weights.quantized.rounded import nf4_format, nf4_rounded

pytest.importorskip("peft")

from peft import PeftModel

from tests import tiny_models
from tests.training.test_tuned import close, examples, gradients, their_nats
from tests.weights.quantized_files import SCHEMES, quantize

CPU = torch.device("cpu")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 320},  # 256 divides the inputs of some maps and not of others
    "gpt2": {"n_embd": 256, "hidden_size": 256, "n_head": 4},  # stored transposed, with biases
}


def numbers(rounded: dict[str, Tensor], inputs: int) -> Tensor:
    how = nf4_format(inputs)
    assert how is not None
    outer = rounded.get("outer_OS")
    return Coded(rounded["code_OB"], rounded["scale_OG"], None, outer, None, None, None, how).dequantized()


@pytest.mark.parametrize("inputs", [192, 512])
def test_numbers_become_the_nearest_of_nf4(inputs: int) -> None:
    """Each value is the nearest of the sixteen times the group's scale. Double quantization moves that scale by
    at most half a step of the largest of four."""
    weight = torch.randn(6, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[1] = 0
    rounded = nf4_rounded(weight.float())
    found = numbers(rounded, inputs).double().unflatten(1, (-1, 64))
    groups = weight.unflatten(1, (-1, 64))
    largest = groups.abs().amax(2)
    scale = rounded["scale_OG"].double()
    if "outer_OS" in rounded:
        scale = scale * rounded["outer_OS"].double().repeat_interleave(4, 1)
        most = largest.unflatten(1, (-1, 4)).amax(2).repeat_interleave(4, 1)
        assert ((scale - largest).abs() <= most * (0.5 / 127 + 2**-10)).all()
    else:
        torch.testing.assert_close(scale, largest, rtol=1e-7, atol=0)
    choices = torch.tensor(TABLES["nf4"], dtype=torch.float64) * scale[..., None, None]
    nearest = (choices - groups[..., None]).abs().amin(-1)
    torch.testing.assert_close((found - groups).abs(), nearest, rtol=1e-5, atol=1e-6)


def adapted(folder: Path, *, quantized: bool = False) -> tuple[Lora, PackRunner, ModelConfig]:
    model = read_model_config(folder)
    decoder = opened(folder, model, "qlora", torch.float32, CPU, quantized=quantized)
    lora = Lora(decoder, model, LoraConfig(rank=3, alpha=5), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "up_OR" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return lora, PackRunner(decoder, autocast=None, chunk=7), model


def check_gradients(lora: Lora, runs: PackRunner, network: Any, folder: Path) -> None:
    """Compare the loss and its gradients with PEFT's of the adapter in a folder, on a network of transformers."""
    theirs = PeftModel.from_pretrained(network.double(), folder, is_trainable=True).double()
    their_loss = their_nats(theirs, examples())
    their_loss.backward()
    loss = runs.nats(examples())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    wanted = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, thin in lora.maps.items():
        assert isinstance(thin, ThinMap)
        assert thin.down_RI.grad is not None
        assert thin.up_OR.grad is not None
        module = f"base_model.model.{name.replace('/', '.')}"
        # float32 beside float64: CPUs have up to 1.5e-4
        close(thin.down_RI.grad, wanted[f"{module}.lora_A.weight"], name, 3e-4)
        close(thin.up_OR.grad, thin.place.in_our_order(wanted[f"{module}.lora_B.weight"]), name, 3e-4)


@pytest.mark.parametrize("name", ["bnb nf4 nested", "awq", "auto-round"])
def test_a_quantized_folder_keeps_its_form_and_has_the_gradients_of_its_numbers(name: str, tmp_path: Path) -> None:
    folder, numbers = quantize("llama", SCHEMES[name], tmp_path / "model")
    lora, runs, _ = adapted(folder, quantized=True)
    assert held_bytes(runs.decoder)["codes"] > 0
    lora.export(tmp_path / "adapter", "base")
    check_gradients(lora, runs, numbers, tmp_path / "adapter")


def test_a_folder_without_codes_is_refused(tmp_path: Path) -> None:
    folder, _ = quantize("llama", SCHEMES["fp8 static"], tmp_path / "model")
    with pytest.raises(InvalidConfig, match=r"holds no weights in codes .*--method lora"):
        adapted(folder, quantized=True)


@pytest.mark.parametrize("family", SIZES)
def test_gradients_beside_nf4_are_those_of_peft_on_its_numbers(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(family, tmp_path / "base", **SIZES[family])
    lora, runs, _ = adapted(folder)
    lora.export(tmp_path / "adapter", "base")
    network = tiny_models.build(family, **SIZES[family])
    changed = 0
    with torch.no_grad():
        for module in lora.places:
            weight, flip = network.get_parameter(f"{module}.weight"), lora.places[module].source.transpose
            plain = weight.T if flip else weight
            found = numbers(nf4_rounded(plain), plain.shape[1])
            weight.copy_(found.T if flip else found)
            changed += 1
    assert changed == len(lora.maps)
    check_gradients(lora, runs, network, tmp_path / "adapter")
    at_once = gradients(lora)
    recompute(runs.decoder)
    runs.nats(examples()).backward()
    assert all(torch.equal(one, other) for one, other in zip(gradients(lora), at_once, strict=True))


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_kernels_of_a_gpu_have_the_gradients_of_plain_ops_where_layers_run_again(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together, by Triton's interpreter. An adapter's thin products go into the room behind rows, and are
    multiplied with them, but for the input of attention's output: torch made that."""
    pytest.importorskip("triton")
    together, rooms = lora_module._together, list[bool]()

    def noting(*given: Tensor) -> Tensor | None:
        found = together(*given)
        rooms.append(found is not None)
        return found

    monkeypatch.setattr(lora_module, "_together", noting)
    folder = tiny_models.save("llama", tmp_path / "base", hidden_size=64, intermediate_size=128)
    model, found = read_model_config(folder), []
    for fused in (False, True):
        with monkeypatch.context() as patched:
            if fused:
                patched.setattr(base, "on_gpu", lambda _: True)
                patched.setattr(PackedCausal, "attend", lambda self, *given: self.masked(*given[:3]))
            decoder = opened(folder, model, method, torch.float32, CPU)
            assert (decoder.ops.chosen["rope"] == "triton_training") == fused
            learnt = decoder if method == "full" else Lora(decoder, model, LoraConfig(rank=3), seed=0)
            if method != "full":
                with torch.no_grad():
                    for name, parameter in learnt.named_parameters():
                        parameter.add_(0.05 if "up_OR" in name else 0.0)
            recompute(decoder)
            PackRunner(decoder, autocast=None, chunk=7).nats(examples(3)).backward()
            found.append([p.grad for p in learnt.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        close(other, one, method)
    # Of two layers: forward, again but for the last map, whose output nobody needs, and backward; there the gradient of
    # the last layer's output is that of the tokens that count
    wanted = (6 + 5 + 7, 2 + 2 + 1) if method == "lora" else (0, 0)
    assert (rooms.count(True), rooms.count(False)) == wanted


def test_no_plain_weight_of_a_layer_is_held(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    _, runs, _ = adapted(tiny_models.save("llama", tmp_path / "base", **sizes))
    maps = [each for name, each in runs.decoder.named_modules() if isinstance(each, Linear) and "layers" in name]
    weights = [each.matrix.inner for each in maps if isinstance(each.matrix, LearntWeight | FrozenWeight)]
    assert len(weights) == len(maps)
    assert all(each.weight is None for each in maps)
    count = sum(sum(each.parts) * each.inputs for each in maps)
    assert held_bytes(runs.decoder)["codes"] == count * (4 + 8 / 64 + 16 / 256) / 8
