"""Steps of a whole model at long contexts, without the prompts that would lead there.

A worker with random weights runs made-up plans (`made_plan`): rows at any context over a cache that was not filled. The
times are those of the device between the two ends of a step, with the graphs and kernels that a server would use. What
a cache holds does not change how long it takes to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ridgeline.assembly import assemble
from ridgeline.assembly.wiring import Assembly
from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.crossover import Curve
from ridgeline_bench.profile.made_plan import layout_for, made_plan, next_plan

REPEATS = 7
EXPECTED_KV_DTYPE = {"fp8": "fp8", "int8": "int8"}  # as `LLMConfig.kv_cache_dtype` names what `plan` calls so


def measure_contexts(
    curve: Curve, model: str, contexts: Sequence[int], device: str = "auto"
) -> dict[int, tuple[float, float]]:
    """Return context → (seconds of a step of decoding, of a prompt's last chunk), medians, for the contexts that the
    model's positions and the device's memory allow.

    Raise InvalidConfig if not even the shortest of them can be run.
    """
    room = curve.model.max_position_embeddings
    wanted = [context for context in contexts if context <= room]
    if not wanted:
        raise InvalidConfig(f"{curve.name} has positions for {room:,} tokens; give a shorter --contexts.")
    config = LLMConfig(
        model=model,
        device=device,
        load_format="dummy",
        max_num_seqs=max(curve.batch, 1),
        max_num_batched_tokens=max(curve.chunk, curve.batch),
        kv_cache_dtype=EXPECTED_KV_DTYPE.get(curve.kv_dtype, "auto"),
        enable_prefix_caching=False,
        gpu_memory_utilization=curve.utilization,
        skip_tokenizer_init=True,
        capture_at_start=True,
    )
    assembly = assemble(config)
    try:
        found = {}
        for context in wanted:
            if context > assembly.engine.config.max_model_len or not all(
                _fits(assembly, shape) for shape in (curve.decoding(context), curve.prompt(context))
            ):
                break
            found[context] = (
                seconds_of(assembly, curve.decoding(context)),
                seconds_of(assembly, curve.prompt(context)),
            )
        if not found:
            raise InvalidConfig(
                f"the cache has no room for {curve.batch} requests of {wanted[0]:,} tokens; give a smaller --batch."
            )
        return found
    finally:
        assembly.engine.shutdown()


def seconds_of(assembly: Assembly, shape: StepShape, repeats: int = REPEATS) -> float:
    """Return the device's seconds of such a step, the median of several after one that does not count.

    Steps of decoding follow one another, a token further each, and the last one is as `shape` says. As in service the
    device gets tables with the first step alone, for which the host takes longer than for the step itself, and it finds
    the next step when one ends: the time that the host takes to launch it does not count.
    """
    spec, layout, worker = assembly.model.spec, assembly.engine.layout, assembly.local
    first, spare = _first(shape, repeats)
    plans = [made_plan(spec, first, layout, spare=spare)]
    for number in range(2, repeats + 2):
        plans.append(next_plan(plans[-1]) if spare else made_plan(spec, shape, layout, number))
    times = []
    for queued in [plans] if spare else [[plan] for plan in plans]:
        for plan in queued:
            worker.submit(plan)
        for result in [worker.collect() for _ in queued]:
            if result.error is not None:
                raise RidgelineError(
                    f"a step of {shape.num_tokens_R} tokens at {shape.kv_len_R} failed: {result.error}"
                )
            times.append(result.elapsed)
    return median(times[1:])


def _first(shape: StepShape, repeats: int) -> tuple[StepShape, int]:
    """Return the first of the steps that are measured, and how many tokens of each row follow it: none, unless every
    row decodes."""
    if any(count != 1 for count in shape.num_tokens_R):
        return shape, 0
    return shape._replace(kv_len_R=[max(1, int(length) - repeats) for length in shape.kv_len_R]), repeats


def _fits(assembly: Assembly, shape: StepShape) -> bool:
    layout = assembly.engine.layout
    first, spare = _first(shape, REPEATS)
    needed = layout_for(assembly.model.spec, first, layout.dtype, layout.block_size, spare)
    return needed.num_pages <= layout.num_pages
