"""The kernels that an engine needs, compiled without its GPU: every captured shape is run on tensors that hold nothing.
`compilers.py` does so in several processes, each of which begins here."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import sys
import threading
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ridgeline.core.plan.reserve import StepSizes
from ridgeline.core.settings.speculation import Speculation
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.draft_head import HeadSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec
from ridgeline.core.timeline import now, process_start
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.recipe import FusionRecipe
from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.aot import Compiled, compiling_for
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.weight_format import HeldMatrix
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.quantization.held import keeping
from ridgeline.quantization.scheme import scheme
from ridgeline.worker.graphs import CAPTURED_FEATURES, Buckets
from ridgeline.worker.runner import Runner
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.speculation.methods import DraftSource, network_of
from ridgeline.worker.step import DeviceStep, HostLengths

IMPORTED = now()
ROOT = Path(__file__).parents[1]  # the folder of the package
# The packages that decide which kernels there are
SOURCES = ("core", "foreign", "kernels", "layers", "models", "parallel", "perf", "quantization", "worker")
ALIKE = 2  # turns of layers that are run of many alike: the first, and one behind another
PRIORITY = 5  # a lower priority than the process that loads the weights meanwhile


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """All that decides which kernels an engine runs.

    overrides: the overridden ops as (op, implementation), sorted.
    quantization: the scheme to which plain weights are rounded.
    forms: the matrices that keep the form of the files, by the modules' names, sorted.
    speculation: the drafts that rows verify, if they do.
    draft: the network that makes them, if one does. draft_quantization, draft_forms: as those of the model.
    foreign: the config.json of a class of transformers whose modules run. recipe: what ops replace of it.
    """

    spec: ModelSpec
    arch: str
    multiprocessors: int
    dtype: str
    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_size: int
    cascade: bool
    overrides: tuple[tuple[str, str], ...] = ()
    quantization: str | None = None
    forms: tuple[tuple[str, HeldMatrix], ...] = ()
    speculation: Speculation | None = None
    draft: ModelSpec | HeadSpec | None = None
    draft_quantization: str | None = None
    draft_forms: tuple[tuple[str, HeldMatrix], ...] = ()
    foreign: str | None = None
    recipe: FusionRecipe | None = None

    @cached_property
    def marker(self) -> str:
        """The name of an empty file that lies in a cache once all of these kernels do. It is deleted together with the
        cache."""
        import triton

        digest = hashlib.sha256(repr((self, triton.__version__, torch.__version__, _debugging())).encode())
        for path in sorted(path for package in SOURCES for path in (ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
        for path in tuned.files(tuned.GpuKind(_capability(self.arch), self.multiprocessors)):
            digest.update(path.read_bytes())
        return f"ridgeline-{digest.hexdigest()[:32]}"


def _capability(arch: str) -> tuple[int, int]:
    """Return (9, 0) for "sm_90", and (0, 0) for GPUs that are not NVIDIA's."""
    major, minor = divmod(int(arch[3:]), 10) if arch.startswith("sm_") else (0, 0)
    return major, minor


def _debugging() -> list[tuple[str, str]]:
    """Return Triton's environment variables, some of which change what is compiled, without those that
    place its cache."""
    places = ("TRITON_CACHE_DIR", "TRITON_HOME")
    return sorted(item for item in os.environ.items() if item[0].startswith("TRITON_") and item[0] not in places)


def few_layers(kernels: KernelSet) -> KernelSet:
    """Return the kernels' engine with two of its layers of each kind, where these follow one another in turn: they run
    the same kernels, and running all shapes through fewer takes less time."""
    if kernels.foreign is not None or kernels.draft is not None:
        return kernels  # the class builds all of its modules
    spec, encoder = kernels.spec, kernels.spec.encoder
    few = None if encoder is None else replace(encoder, layers=_turns(encoder.layers))
    return replace(kernels, spec=replace(spec, layers=_turns(spec.layers), encoder=few))


def _turns(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the first layers of some that repeat themselves."""
    period = next((p for p in range(1, len(layers)) if layers[p:] == layers[:-p]), len(layers))
    return layers[: ALIKE * period]


def compile_claimed(kernels: KernelSet, claims: Path) -> Compiled:
    """Run every step shape once, and compile each kernel that no other process has claimed. A claim is a file in
    `claims`.

    Running the shapes takes a second or two. So every process may run them all, and take the next kernel when it is
    done with one.
    """
    meta = torch.device("meta")
    drafts = 0 if kernels.speculation is None else kernels.speculation.num_drafts

    def claim(kernel: str) -> bool:
        try:
            (claims / hashlib.sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    kernels = few_layers(kernels)
    with compiling_for(kernels.arch, kernels.multiprocessors, claim) as done, torch.inference_mode():
        ops = Ops(Platform(device_type="cuda", arch=kernels.arch), dict(kernels.overrides))
        dtype, longest = getattr(torch, kernels.dtype), kernels.max_model_len
        decoder = _empty_decoder(kernels, ops)
        draft = None
        if kernels.draft is not None:
            kept = keeping(dict(kernels.draft_forms), scheme(kernels.draft_quantization))
            draft = network_of(kernels.draft, decoder, ops, dtype=dtype, device=meta, positions=longest, scheme_of=kept)
            draft.prepare()
        layers = () if kernels.draft is None else kernels.draft.layers
        groups = replace(kernels.spec, layers=kernels.spec.layers + layers).cache_groups
        sizes = StepSizes(
            device_type="cuda",
            itemsize=dtype.itemsize,
            max_tokens=kernels.max_tokens,
            max_seqs=kernels.max_seqs,
            longest=longest,
            drafts=drafts,
        )
        layout = CacheLayout(
            groups=groups,
            block_size=kernels.block_size,
            dtype=kernels.dtype,
            num_pages=1024,
            scratch=sizes.scratch,
        )
        runner = Runner(
            decoder,
            layout,
            num_slots=kernels.max_seqs,
            max_model_len=longest,
            drafts=None if kernels.speculation is None else DraftSource(kernels.speculation, draft),
        )
        segments = runner.segments
        if runner.encoding is not None:
            runner.encoding.rehearse(kernels.max_tokens)
        buckets = Buckets(kernels.max_seqs, kernels.max_tokens, segments.widths)
        uncaptured = {buckets.uncaptured(rows, kernels.max_tokens) for rows in (1, kernels.max_seqs)}
        # Large steps come first: their kernels take the longest to compile, and what is begun last is waited for
        shapes = [(shape, False) for shape in sorted(buckets.shapes | uncaptured)]
        shapes += [(shape, True) for shape in buckets.sharing] if kernels.cascade else []
        # Where the host knows the rows' lengths, as it does outside of graphs, ops may choose by them
        shape = buckets.uncaptured(1, kernels.max_tokens)
        tokens_R = np.array([shape.tokens])
        segments.forward(DeviceStep(segments.inputs(shape), HostLengths(tokens_R, tokens_R)))
        for shape, cascade in reversed(shapes):
            emits = segments.columns
            verified = Drafts.alike(shape.rows, shape.each, meta, emits) if shape.each > 1 else None
            step = DeviceStep(segments.inputs(shape, cascade=cascade), drafts=verified)
            segments.forward(step)
            if not segments.ending.draws:
                continue
            for features in CAPTURED_FEATURES:
                step.features = features
                segments.sample(step)
            segments.masking.rehearse(step)
        segments.network.rehearse()
    return done


def _empty_decoder(kernels: KernelSet, ops: Ops) -> Decoder:
    """Return the network, on a device that holds no numbers."""
    dtype, meta = getattr(torch, kernels.dtype), torch.device("meta")
    if kernels.foreign is not None:
        foreign = ForeignDecoder(kernels.foreign, kernels.spec, ops, dtype=dtype, device=meta)
        foreign.prepare_empty(kernels.recipe or FusionRecipe())
        return foreign
    scheme_of = keeping(dict(kernels.forms), scheme(kernels.quantization))
    positions = kernels.max_model_len
    decoder = Decoder(kernels.spec, ops, dtype=dtype, device=meta, max_positions=positions, scheme_of=scheme_of)
    decoder.prepare()
    return decoder


def child() -> None:
    """Run one process of `Compilers`: read (KernelSet, folder of claims) from standard input, and print what was
    compiled."""
    gc.freeze()  # torch's modules stay, and no collection visits them
    gc.enable()
    os.nice(PRIORITY)
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    kernels, claims = pickle.load(sys.stdin.buffer)  # it comes from our own parent, as in `multiprocessing`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    began = process_start()
    done = compile_claimed(kernels, claims)
    spent = {"imports": IMPORTED - began, "compiling": done.seconds, "all": now() - began}
    print(
        json.dumps({name: sorted(keys) for name, keys in asdict(done).items() if name != "seconds"} | {"spent": spent})
    )


def _end_with_parent() -> None:
    """End this process when the parent ends. The parent never writes again, but keeps our standard input open as long
    as it lives."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
