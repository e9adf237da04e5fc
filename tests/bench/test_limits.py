"""Limits of workloads, against hand-counted steps and the published table for one H200."""

from __future__ import annotations

import pytest

from ridgeline.kernels.base.cost import StepShape
from ridgeline.models import model_config
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline
from ridgeline_bench.limits import hardware_named, limit_metrics, phase_limit
from ridgeline_bench.workloads import Phase, Size, decoded, workloads

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


class Ledger:
    """A cost model that writes the steps down; each costs a second."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], list[int], int]] = []
        self.shared: list[int] = []

    def step_limit(self, shape: StepShape) -> float:
        self.steps.append(([int(n) for n in shape.num_tokens_R], [int(n) for n in shape.kv_len_R], shape.num_sampled))
        self.shared.append(shape.shared)
        return 1.0


def test_a_phase_is_one_prefill_and_a_step_per_token_for_who_still_runs() -> None:
    ledger = Ledger()
    seconds = phase_limit(Phase("x", [[1, 2, 3], [4, 5]], [3, 2]), ledger)
    assert ledger.steps == [([3, 2], [3, 2], 2), ([1, 1], [4, 3], 2), ([1], [5], 1)]
    assert seconds == 3.0


def test_a_shared_beginning_runs_once_but_every_prompt_runs_its_last_token() -> None:
    ledger = Ledger()
    phase_limit(Phase("x", [[7, 8, 1], [7, 8, 2], [7, 8, 9]], [1, 1, 1]), ledger)
    phase_limit(Phase("x", [[7, 8], [7, 8]], [1, 1]), ledger)
    assert [step[0] for step in ledger.steps] == [[3, 1, 1], [2, 1]]


def test_decode_steps_are_what_whole_requests_have_more_than_their_first_tokens() -> None:
    ledger = Ledger()
    work = decoded(2, 3, 5, Size(vocab_size=50))
    limits = limit_metrics(work, ledger)
    assert (limits["prompts"].value, limits["whole"].value) == (1000.0, 5000.0)  # milliseconds
    assert ledger.steps[2:] == [([1, 1], [3 + n, 3 + n], 2) for n in range(1, 5)]
    prompts = [tuple(prompt) for phase in work.phases for prompt in phase.prompts]
    prompts += [
        tuple(prompt) for phase in decoded(2, 3, 5, Size(vocab_size=50), seed=1).phases for prompt in phase.prompts
    ]
    assert len(set(prompts)) == 8, "no cache of prefixes finds one"


def test_every_step_of_a_phase_says_what_its_prompts_share() -> None:
    ledger = Ledger()
    phase_limit(Phase("x", [[7, 8, 1], [7, 8, 2]], [3, 2]), ledger)
    phase_limit(Phase("x", [[7, 8, 1], [6, 8, 1]], [2, 2]), ledger)
    assert ledger.shared == [2, 2, 2, 0, 0]


def test_no_decode_step_of_w5_reads_its_shared_tokens_512_times() -> None:
    """By hand for the 1B model, bf16 on an H200 (4.42 TB/s): 16 layers x 2 x 8 heads x 64 x 2 B are 32 KiB a token.

    Half way a decode step reads 2048 shared tokens and 512 x 160 of the requests' own: 2.75 GB, 0.62 ms (the shared
    ones 512 times would be 7.8 ms more). Its 512 tokens x 2 x 1.236e9 FLOPs take 1.69 ms at 750 TFLOP/s. The prompts'
    67,584 tokens x 2 x 0.973e9 take 175 ms, attention's pairs, 512 x 128 x 2112 x 131,072 FLOPs, 24 ms. So 32,768
    tokens need 175 + 24 + 63 x 2.31 = 345 ms: 95,000 tokens/s at most, and norms, activations and sampling on top.
    """
    model = Roofline(model_config(LLAMA_1B).spec, find("H200").attained(), "bfloat16")
    (made,) = workloads(["W5"], Size())
    assert 0.85 * 95_000 < limit_metrics(made, model)["output"].value < 95_000


@pytest.mark.parametrize(
    ("workload", "metric", "milliseconds"),
    [("W2", "tpot", 0.56), ("W3-b8", "step b8", 0.62), ("W3-b64", "step b64", 1.08), ("W3-b256", "step b256", 2.91)],
)
def test_limits_of_llama_1b_on_an_h200(workload: str, metric: str, milliseconds: float) -> None:
    """The published ones count products and caches alone; norms, rotary and sampling add up to 15 %."""
    model = Roofline(model_config(LLAMA_1B).spec, find("H200").attained(), "bfloat16")
    (made,) = workloads([workload], Size())
    assert milliseconds * 0.98 <= limit_metrics(made, model)[metric].value <= milliseconds * 1.15


def test_hardware_is_found_by_the_drivers_name_and_unknown_machines_have_none() -> None:
    known = hardware_named("NVIDIA H200")
    assert known is not None
    assert known.bandwidth == find("H200").attained().bandwidth
    assert hardware_named("Some CPU, 3 threads") is None
