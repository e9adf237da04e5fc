"""The host time of one step without the model: schedule, input preparation and update.

    python -m ridgeline_bench.scripts.control_plane [--running 256] [--steps 400]

The plans, slots and inputs are the engine's own. Only the network is left out: random logits are sampled outside the
measured time. Decoding requests cross block boundaries as in real use, and every request that ends is replaced, so
admissions and prefills are part of the measured steps.
"""

from __future__ import annotations

import random
import time

import numpy as np
import torch

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import StepPlan, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.engine.scheduler import Scheduler
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.worker.runner import Runner
from ridgeline.worker.step import PlannedStep
from ridgeline_bench.scripts.asked import asked

PARTS = ("schedule", "prepare", "update")


def tiny_spec() -> ModelSpec:
    mixer = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    layer = LayerSpec(mixer=mixer, feed_forward=MLPSpec(intermediate_size=8), norm=NormSpec())
    return ModelSpec(
        architecture="none",
        vocab_size=64,
        hidden_size=8,
        layers=(layer,),
        final_norm=NormSpec(),
        max_position_embeddings=4096,
    )


class Bench:
    """An engine with `running` requests under way, each with a prompt of 256 and an output of 512 to 1024 tokens."""

    def __init__(self, running: int, device: torch.device) -> None:
        spec = tiny_spec()
        layout = CacheLayout(groups=spec.cache_groups, block_size=16, dtype="float32", num_pages=running * 96)
        ops = Ops(Platform.of(device))
        decoder = Decoder(spec, ops, dtype=torch.float32, device=device)
        config = EngineConfig(max_model_len=4096, max_num_seqs=running, max_num_batched_tokens=8192)
        self.runner = Runner(decoder, layout, num_slots=running, max_model_len=4096)
        self.scheduler = Scheduler(config, layout)
        self.random = random.Random(0)
        self.added = 0
        self.running = running
        self.top_up()

    def top_up(self) -> None:
        while self.scheduler.num_running + self.scheduler.num_waiting < self.running:
            prompt = tuple(self.random.randrange(64) for _ in range(256))
            # The first requests are shorter, as if they were half done, so that their ends are spread from the start.
            shortest = 512 if self.added >= self.running else 16
            length = 256 + self.random.randrange(shortest, 1024)
            self.added += 1
            self.scheduler.add(
                Request(
                    id=str(self.added),
                    prompt_token_ids=prompt,
                    params=SamplingParams(temperature=0),
                    seed=0,
                    max_total_tokens=length,
                )
            )

    def step(self) -> tuple[dict[str, float], StepPlan]:
        times = {}
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        times["schedule"] = time.perf_counter() - started
        assert plan is not None
        started = time.perf_counter()
        with torch.inference_mode():
            step = PlannedStep(plan, {})
            for _, prepare in self.runner._prepare:
                prepare(step)
        times["prepare"] = time.perf_counter() - started
        lengths = torch.from_numpy(plan.kv_bound_R.astype(np.int64)).to(self.runner.device)
        logits = torch.randn(len(plan.rows), 64, device=self.runner.device)
        device = step.device
        device.active_R = self.runner.slots.stopped_S[device.inputs.slots_R] == 0
        device.kv_len_R, device.logits_RU = lengths, logits
        outcome = self.runner.sample(step).device.outcome
        result = StepResult(
            plan_id=plan.id,
            tokens_RK=outcome.token_R.cpu().numpy()[:, None],
            emitted_R=(outcome.token_R >= 0).int().cpu().numpy(),
            finish_R=outcome.finish_R.cpu().numpy(),
        )
        started = time.perf_counter()
        self.scheduler.update(result)
        times["update"] = time.perf_counter() - started
        self.top_up()
        return times, plan


def main() -> None:
    a = asked(__doc__, running=256, steps=400, device="cpu")
    torch.set_num_threads(1)
    bench = Bench(a.running, torch.device(a.device))
    while bench.scheduler.num_waiting:
        bench.step()
    measured = [bench.step() for _ in range(a.steps)]
    steady = [times for times, plan in measured if not plan.spans]
    for name, group in (("every step", [times for times, _ in measured]), ("steady decode", steady)):
        micros = {part: 1e6 * float(np.median([times[part] for times in group])) for part in PARTS}
        total = 1e6 * float(np.median([sum(times.values()) for times in group]))
        parts = ", ".join(f"{part} {value:.0f}" for part, value in micros.items())
        print(f"{name}: median {total:.0f} µs a step at {a.running} running ({parts}); {len(group)} steps")


if __name__ == "__main__":
    main()
