"""The stages of a model together compute what it computes, and each loads and keeps its own part alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.stages import deal, of_stage, stage_of
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.kernels.gemm.experts.panels import ExpertPanels
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.layers.dense import dense_states
from ridgeline.layers.experts import ExpertStack
from ridgeline.parallel.mesh import Mesh
from ridgeline.perf.footprint import parameters
from ridgeline.quantization.held import keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.weights import loader
from ridgeline.weights.loader import load_weights, read_model_config, stored_forms
from tests import gguf_files, tiny_models
from tests.parallel.divided import CPU, OPS, TOKENS, loaded, logits, numbers_of
from tests.ranks.stages import QueuePipe, pipes
from tests.weights.loading import OPS as EXACT_OPS
from tests.weights.quantized_files import SCHEMES, quantize
from tests.worker.test_memory import activation_bytes

POSITIONS = torch.arange(len(TOKENS))


def stages_of(folder: Path, count: int, layers: str | None = None) -> list[Decoder]:
    return [loaded(folder, Mesh(pp=pipe, layers=layers)) for pipe in pipes(count)]


def numbers_held(stage: Decoder) -> int:
    stacks = [module.matrices for module in stage.modules() if isinstance(module, ExpertStack)]
    panels = [stack for stack in stacks if isinstance(stack, ExpertPanels)]  # they are no parameters
    laid_out = (stack.matrix(expert) for stack in panels for expert in range(len(stack.panel_EBSHLN)))
    return sum(numbers.numel() for numbers in (*stage.parameters(), *laid_out))


@torch.inference_mode()
def passed_through(stages: list[Decoder]) -> Tensor:
    """The scores that the last stage has, where each gets what the one before hands on."""
    x_TM, hidden = None, Hidden(torch.empty(0), None)
    for stage in stages:
        states = dense_states(stage.spec, 1, len(TOKENS), torch.float32, CPU)
        hidden = stage(TOKENS, POSITIONS, states, x_TM)
        x_TM = stage.handed_on(hidden)
    return stages[-1].logits(hidden)


@pytest.mark.few(16)
@pytest.mark.parametrize("family", tiny_models.ATTENDING)
def test_stages_score_as_one_device(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Every layer is a stage. None holds a parameter that another holds, but for a table that both ends need."""
    folder = tiny_model(family)
    spec = read_model_config(folder).spec
    count = len(spec.layers)
    stages = stages_of(folder, count)
    torch.testing.assert_close(passed_through(stages), logits(folder, Mesh()), rtol=0, atol=0)
    held = [numbers_held(stage) for stage in stages]
    assert held == [parameters(stage_of(spec, number, (1,) * count)).total for number in range(count)]
    twice = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    assert sum(held) == parameters(spec).total + twice


def test_each_stage_has_its_own_copy_of_a_block_that_layers_share(tiny_model: Callable[[str], Path]) -> None:
    """Layers 1 and 3 share one block, and layer 2 has another."""
    folder, counts = tiny_model("zamba2"), (1, 2, 1)
    spec = read_model_config(folder).spec
    specs = [stage_of(spec, number, counts) for number in range(3)]
    copied = ("layers.0.mixer.block.", "layers.1.mixer.block.")
    assert [each.stage.copied for each in specs if each.stage] == [(), (), (copied,)]
    stages = stages_of(folder, 3, "1,2,1")
    assert [numbers_held(stage) for stage in stages] == [parameters(each).total for each in specs]
    own, theirs = (dict(stages[number].named_parameters()) for number in (2, 1))
    found = {name for name in own if name.startswith(copied[0])}
    assert len(found) == 6
    for name in found:
        assert torch.equal(own[name], theirs[name]), name


@pytest.mark.parametrize("name", ["gptq", "fp8 dynamic"])
def test_quantized_weights_keep_their_form_on_stages(name: str, tmp_path: Path) -> None:
    folder, _ = quantize("llama", SCHEMES[name], tmp_path / "model", hidden_size=256)
    assert_forms_kept(folder)


def test_blocks_of_gguf_keep_their_form_on_stages(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = tiny_models.build("llama", hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    assert_forms_kept(gguf_files.write(model, tmp_path / "model.gguf", kinds={"*": "Q5_0"}))


def assert_forms_kept(folder: Path) -> None:
    def kept(mesh: Mesh) -> Decoder:
        model = read_model_config(folder)
        forms = of_stage(stored_forms(folder, model), mesh.stage_of(model.spec))
        scheme_of = keeping(forms, scheme(None))
        decoder = Decoder(model.spec, EXACT_OPS, dtype=torch.float32, device=CPU, scheme_of=scheme_of, mesh=mesh)
        load_weights(decoder, folder, model.weights)
        return decoder

    whole, stages = kept(Mesh()), [kept(Mesh(pp=pipe)) for pipe in pipes(2)]
    for index, layer in enumerate(whole.layers):
        for path, module in layer.named_modules():
            if getattr(module, "fillings", ()):
                own = stages[index].layers[0].get_submodule(path)
                assert torch.equal(numbers_of(own), numbers_of(module))  # type: ignore[arg-type]
    assert bool(whole.unembed.fillings) == bool(stages[1].unembed.fillings)
    if whole.unembed.fillings:
        assert torch.equal(numbers_of(stages[1].unembed), numbers_of(whole.unembed))


def test_a_stage_reads_its_own_layers_alone(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    opened = loader.open_checkpoint

    class Watched:
        def __init__(self, folder: Path) -> None:
            self._inner = opened(folder)

        def __enter__(self) -> dict[str, loader.StoredTensor]:
            return {name: replace(each, read=self._noting(name, each.read), sliced=None)
                    for name, each in self._inner.__enter__().items()}  # fmt: skip

        def __exit__(self, *error: object) -> None:
            self._inner.__exit__(*error)  # type: ignore[arg-type]

        def _noting(self, name: str, original: Callable[[], Tensor]) -> Callable[[], Tensor]:
            def noting() -> Tensor:
                read.append(name)
                return original()

            return noting

    monkeypatch.setattr(loader, "open_checkpoint", Watched)
    loaded(tiny_model("llama"), Mesh(pp=pipes(2)[1]))
    assert all(name.startswith(("model.layers.1.", "model.norm", "lm_head")) for name in read)
    assert {"model.norm.weight", "lm_head.weight"} <= set(read)


def test_random_weights_differ_between_stages(tiny_model: Callable[[str], Path]) -> None:
    model = read_model_config(tiny_model("llama"))

    def made_up(pipe: QueuePipe) -> Tensor:
        decoder = Decoder(model.spec, OPS, dtype=torch.float32, device=CPU, mesh=Mesh(pp=pipe))
        load_weights(decoder, tiny_model("llama"), model.weights, load_format="dummy", seed=5)
        return decoder.layers[0].feed_forward.down.weight

    first, second = (made_up(pipe) for pipe in pipes(2))
    assert not torch.equal(first, second)


def spec_of(layers: int, *, vocab: int = 1000, wide: int | None = None) -> ModelSpec:
    """A model of equal layers, but for the last one's feed-forward."""
    mixer = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    one = LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=64), norm=NormSpec())
    last = replace(one, feed_forward=MLPSpec(intermediate_size=wide or 64))
    return ModelSpec(
        architecture="none",
        vocab_size=vocab,
        hidden_size=64,
        layers=(*(one,) * (layers - 1), last),
        final_norm=NormSpec(),
        max_position_embeddings=64,
    )


def slowest(spec: ModelSpec, counts: tuple[int, ...]) -> int:
    each = [parameters(stage_of(spec, number, counts)) for number in range(len(counts))]
    return max(own.products + own.unembed for own in each)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", [spec_of(9), spec_of(8, vocab=100), spec_of(7, wide=2000), spec_of(4, vocab=90_000)])
def test_the_slowest_stage_is_as_fast_as_can_be(spec: ModelSpec, stages: int) -> None:
    counts = deal(spec, stages)
    assert sum(counts) == len(spec.layers)
    assert min(counts) > 0
    assert slowest(spec, counts) == min(slowest(spec, each) for each in divisions(len(spec.layers), stages))


def divisions(layers: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 1:
        return [(layers,)]
    return [(n, *rest) for n in range(1, layers - stages + 2) for rest in divisions(layers - n, stages - 1)]


def test_block_ids_mean_the_same_on_every_stage(tiny_model: Callable[[str], Path]) -> None:
    """Though gemma4's stages have other numbers of layers of each kind, and some none."""
    spec = read_model_config(tiny_model("gemma4")).spec
    stages = [stage_of(spec, number, (1, 2)) for number in range(2)]
    layouts = [CacheLayout(groups=each.cache_groups, block_size=4, dtype="float32", num_pages=7) for each in stages]
    first, second = layouts
    assert [len(group.layers) for group in first.groups] == [0, 1]
    assert [len(group.layers) for group in second.groups] == [1, 1]
    assert first.page_bytes == second.page_bytes
    for group in range(len(first.groups)):
        assert first.groups[group].spec == second.groups[group].spec
        assert first.blocks_per_page(group) == second.blocks_per_page(group)
        for page in range(7):
            ids = [
                [layout.block_id(group, page, n) for n in range(layout.blocks_per_page(group))] for layout in layouts
            ]
            assert ids[0] == ids[1]


def test_a_stage_has_room_for_what_goes_and_comes() -> None:
    whole, stage = spec_of(4), stage_of(spec_of(4), 1, (1, 3))
    sizes = [activation_bytes(each, max_tokens=100, max_seqs=4) for each in (whole, stage)]
    assert sizes[1] - sizes[0] == 3 * 100 * 64 * 2


def test_a_layer_with_a_block_of_others_counts_as_one_with_its_own(tiny_model: Callable[[str], Path]) -> None:
    spec = read_model_config(tiny_model("zamba2")).spec
    assert [layer.mixer.owner for layer in spec.layers[1:]] == [True, True, False]  # type: ignore[attr-defined]
    mamba, own, _, other = spec.layers
    assert deal(replace(spec, layers=(mamba, own, *(other,) * 4), vocab_size=1), 2) == (3, 3)


def test_what_has_no_stages_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="is 10, and the model has 9 layers"):
        deal(spec_of(9), 10)
