"""On the step's path only `collect` waits for the device, and it waits for its own step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.core.plan.step import Assign
from ridgeline.worker.slots import Slots
from ridgeline.worker.upload import Download, upload
from tests.driving import Rig, ask, rig
from tests.test_token_masks import Alternating

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


class NoWaiting(TorchDispatchMode):
    """Refuses the ops whose result has a size, or is a number, that the host must ask the device for."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.partition(".")[0] not in self.WAITING, f"{func} would hold the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_slots_take_biases_and_known_tokens_without_waiting(device: torch.device) -> None:
    slots, prompt, output = Slots(3, 1, 1, 50, device), (4, 9, 4, 49), (7, 7, 0, 9, 7)
    params = SamplingParams(logit_bias={8: 1.5, 3: -2.0}, presence_penalty=1.0)
    form = Assign(1, 1, 0, -1, ((),), params, 0, frozenset(), 100, prompt, output)
    with NoWaiting(), waiting_forbidden(device):
        slots.apply([form])
    tables = slots.sampling
    assert tables.prompt_seen_SV.nonzero().tolist() == [[1, token] for token in sorted(set(prompt))]
    assert tables.output_count_SV[1].tolist() == [output.count(token) for token in range(50)]
    assert tables.bias_ids_SB[1, :3].tolist() == [8, 3, -1]
    assert tables.bias_SB[1, :3].tolist() == [1.5, -2.0, 0.0]
    with NoWaiting(), waiting_forbidden(device):  # the next request has neither bias nor output
        slots.apply([Assign(1, 2, 0, -1, ((),), SamplingParams(presence_penalty=1.0), 0, frozenset(), 100, (5,))])
    assert tables.prompt_seen_SV[1].nonzero().tolist() == [[5]]
    assert not tables.output_count_SV.any()
    assert (tables.bias_ids_SB == -1).all()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_goes_to_the_device_and_back_is_the_same(device: torch.device) -> None:
    values = [np.arange(6).reshape(2, 3), np.empty((2, 0), np.int64), np.array([1.5, -np.inf], np.float32)]
    with waiting_forbidden(device):
        tensors = [upload(array, device) for array in values]
        download = Download(tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for array, back in zip(values, download.arrays(), strict=True):
        assert back.dtype == array.dtype
        assert back.tolist() == array.tolist()


# ---- a whole engine: every feature, in graphs and without -----------------------------------------------------------


@contextmanager
def waiting_forbidden(device: torch.device) -> Iterator[None]:
    """A call that holds the host until a GPU has done its work is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requests() -> list[Request]:
    """One for each feature, and one with most of them."""
    everything: dict[str, Any] = {"logprobs": 3, "logit_bias": {7: 2.0}, "presence_penalty": 0.5, "min_tokens": 3}
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 4},
        {"temperature": 1.1, "typical_p": 0.7, "seed": 5},
        {"logprobs": 2},
        {"logit_bias": {5: 3.0, 9: -4.0}},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"min_tokens": 4, "stop_ids": frozenset([3, 4])},
        {"prompt_logprobs": 2},
        {"mask": Alternating()},
        {"allowed_token_ids": list(range(0, 320, 3)), "bad_words": [[3], [6, 9]], "logprobs": 1},
        {"guidance_scale": 1.5, "negative_prompt": [60, 61, 62]},
        everything | {"temperature": 0.7, "min_p": 0.05, "mask": Alternating(), "prompt_logprobs": 1},
        everything | {"guidance_scale": 2.0, "mask": Alternating()},
    ]
    common = tuple(range(100, 122))  # some blocks are found, and the one in which prompts part is copied
    return [ask(f"r{n}", (*common, *range(n, 2 * n + 1)), max_tokens=9, **options) for n, options in enumerate(asked)]


def run_all(own: Rig) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Tokens and logprobs of all, run twice, so that the second time finds the first's blocks."""
    tokens, scores = {}, {}
    for round in range(2):
        batch = [replace(request, id=f"{request.id}.{round}") for request in requests()]
        for name, outcome in own.run(*batch).items():
            tokens[name], scores[name] = outcome.tokens, [logprob for _, logprob in outcome.scored]
    assert own.errors == []
    assert {name: outcome.error for name, outcome in own.outcomes.items() if outcome.error} == {}
    return tokens, scores


SETTINGS: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 64, "capture_at_start": True}


def test_all_features_run_beside_each_other(tiny_model: Callable[[str], Path]) -> None:
    """The workload of the test below runs, on a CPU too, and its second round is the first again."""
    with rig(tiny_model("qwen3"), **SETTINGS) as own:
        tokens, scores = run_all(own)
    for n in range(14):
        assert tokens[f"r{n}.0"] == tokens[f"r{n}.1"]
        assert scores[f"r{n}.0"] == pytest.approx(scores[f"r{n}.1"], abs=1e-4)
    assert len(scores["r12.0"]) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_no_feature_holds_the_host(tiny_model: Callable[[str], Path], enforce_eager: bool) -> None:
    folder, device = tiny_model("qwen3"), torch.device("cuda")
    with rig(folder, **SETTINGS) as own:
        expected, expected_scores = run_all(own)
    options = {"device": "cuda", "enforce_eager": enforce_eager, "kv_cache_memory": 1 << 26, "debug_checks": False}
    with rig(folder, **SETTINGS, **options) as own:
        submit, provide_masks, collect = own.worker.submit, own.worker.provide_masks, own.worker.collect

        def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                with waiting_forbidden(device):
                    return call(*arguments)

            return run

        own.worker.submit = guarded(submit)  # type: ignore[method-assign]
        own.worker.provide_masks = guarded(provide_masks)  # type: ignore[method-assign]
        own.worker.collect = guarded(collect)  # type: ignore[method-assign]  # waits for an event, not for the stream
        tokens, scores = run_all(own)
    assert tokens == expected
    for name, wanted in expected_scores.items():
        assert scores[name] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.gpu
def test_masks_and_prompt_logprobs_leave_a_batch_in_its_graphs(tiny_model: Callable[[str], Path]) -> None:
    """All steps replay both their graphs, but for the sampling of what no graph was captured for."""
    captured = [
        {"mask": Alternating()},
        {"mask": Alternating(), "temperature": 0.8, "seed": 1, "logprobs": 2},
        {"prompt_logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "seed": 2},
    ]
    eager: list[str] = []
    with rig(tiny_model("qwen3"), device="cuda", kv_cache_memory=1 << 26, debug_checks=False, **SETTINGS) as own:
        segments = own.runner.segments
        for name in ("forward", "sample"):
            run = getattr(segments, name)
            setattr(segments, name, lambda *a, name=name, run=run, **k: (eager.append(name), run(*a, **k))[1])
        outcomes = own.run(*(ask(f"r{n}", range(5, 30 + n), max_tokens=12, **o) for n, o in enumerate(captured)))
        assert own.errors == []
    assert [token % 2 for token in outcomes["r0"].tokens] == [0, 1] * 6
    assert len(outcomes["r1"].scored) == 12
    assert eager == []
