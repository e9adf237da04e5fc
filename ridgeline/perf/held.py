"""The precision of a model whose weights keep the form of their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.weight_format import Fp8Format, HeldMatrix, Int8Format
from ridgeline.perf.footprint import product_name
from ridgeline.perf.precision import Precision


def held_precision(plain: Precision, model: ModelSpec, forms: Mapping[str, HeldMatrix]) -> Precision:
    """Return the precision in which products of one name have the mean bytes of all layers' matrices, and run at the
    rate of most of them.

    plain: of the matrices that are in no other form. forms: the others, by the names of the decoder's modules.
    """
    total = Counter({"unembed": model.vocab_size * model.hidden_size})
    for layer in model.layers:
        for name, product in layer.products(model.hidden_size).items():
            total[product_name(name, product)] += product.copies * product.inputs * product.outputs
    numbers, size, rates = Counter[str](), Counter[str](), dict[str, Counter[str]]()
    for module, form in forms.items():
        name = _product(module, form)
        numbers[name] += form.numbers
        size[name] += round(form.num_bytes(plain.item))
        rates.setdefault(name, Counter())[_rate(form, plain)] += form.numbers
    held = []
    for name, count in numbers.items():
        if not total[name]:  # a tower's or an encoder's
            continue
        rates[name][plain.other_rate] += total[name] - count
        mean = (size[name] + (total[name] - count) * plain.item) / total[name]
        held.append((name, mean, rates[name].most_common(1)[0][0]))
    return replace(plain, held=tuple(held))


def held_alike(plain: Precision, model: ModelSpec, size: float, rate: str | None) -> Precision:
    """Return the precision in which all products of the layers read `size` bytes a weight, and run at a rate of this
    name where a device has it. None: at the usual one."""
    products = (each for layer in model.layers for each in layer.products(model.hidden_size).items())
    names = sorted({product_name(*each) for each in products})
    return replace(plain, held=tuple((name, size, rate or plain.product_rate) for name in names))


def _product(module: str, form: HeldMatrix) -> str:
    """Return the name of a module's product: "layers.3.feed_forward.shared.down" is "shared.down"."""
    name = module.split(".", 3)[-1] if module.startswith("layers.") else module
    return f"grouped_{name}" if form.copies > 1 else name


def _rate(form: HeldMatrix, plain: Precision) -> str:
    """Return the rate of a form. Codes are widened on chip, and so is FP8 whose activations are not rounded."""
    kinds = {type(held.format) for held in form.helds if held is not None}
    if None in form.helds or len(kinds) > 1:
        return plain.other_rate
    how = next(held.format for held in form.helds if held is not None)
    if isinstance(how, Int8Format):
        return "int8"
    return "fp8" if isinstance(how, Fp8Format) and how.activations is not None else plain.other_rate
