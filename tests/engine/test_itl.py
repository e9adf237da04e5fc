"""Steps with prompts take no longer than the target while requests decode, and as long as they like otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import BACKGROUND
from ridgeline.core.plan.step import Feature, RowKind, Rows, StepPlan
from ridgeline.core.settings.config import LLMConfig
from ridgeline.engine.itl import DECODE_STEPS, FIRST_GUESS, LEAST, ItlBound, choose_itl_target
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline
from ridgeline.weights.loader import read_model_config
from tests.engine.desk import Desk, make_request


class Linear:
    """A device whose steps take a fixed time, some per token, and some per cached token."""

    def __init__(self, fixed: float, token: float, cached: float) -> None:
        self.fixed, self.token, self.cached = fixed, token, cached

    def step_limit(self, shape: StepShape) -> float:
        return self.fixed + self.token * float(np.sum(shape.num_tokens_R)) + self.cached * float(np.sum(shape.kv_len_R))


@given(
    rows=st.integers(1, 300),
    length=st.integers(1, 5000),
    start=st.integers(0, 100_000),
    most=st.integers(1, 16_384),
    target=st.floats(0.001, 0.5),
    costs=st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-4), st.floats(0, 1e-7)),
)
def test_a_step_fills_its_time_and_exceeds_it_only_to_keep_prompts_alive(
    rows: int, length: int, start: int, most: int, target: float, costs: tuple[float, float, float]
) -> None:
    model, kv_len_R = Linear(*costs), np.full(rows, length)
    tokens = ItlBound(target, model).prompt_tokens(kv_len_R, start, most)

    def seconds(prompt: int) -> float:
        shape = StepShape([1] * rows + [prompt] * (prompt > 0), [length] * rows + [start + prompt] * (prompt > 0), 0)
        return FIRST_GUESS * model.step_limit(shape)

    allowed = max(target, DECODE_STEPS * seconds(0))
    assert 1 <= tokens <= most
    assert tokens <= LEAST or seconds(tokens) <= allowed
    assert tokens == most or seconds(min(most, tokens + LEAST + 256)) > allowed, "more than a tile is left unused"


@given(
    rows=st.integers(0, 300),
    start=st.integers(0, 10_000),
    most=st.integers(1, 16_384),
    wanted=st.integers(1, 20_000),
    target=st.floats(0.001, 0.5),
)
def test_a_prompt_that_is_alone_gets_all_that_the_bound_allows_it(
    rows: int, start: int, most: int, wanted: int, target: float
) -> None:
    bound, kv_len_R = ItlBound(target, Linear(5e-3, 2e-5, 1e-8)), np.full(rows, 500)
    allowed = bound.prompt_tokens(kv_len_R, start, most)
    assert min(wanted, bound.prompt_tokens(kv_len_R, start, most, wanted)) == min(wanted, allowed)


class Asked:
    """A device of which only the steps it was asked about are of interest; tokens cost time."""

    def __init__(self) -> None:
        self.shapes: list[tuple[list[int], list[int], int]] = []

    def step_limit(self, shape: StepShape) -> float:
        num_tokens, kv_len = (np.asarray(counts).astype(int).tolist() for counts in shape[:2])
        self.shapes.append((num_tokens, kv_len, shape.num_sampled))
        return 1e-3 * sum(num_tokens)


@pytest.mark.parametrize("kv_len", [[7, 3000, 9], [5, 6]])
def test_the_model_is_asked_about_steps_that_could_run(kv_len: list[int]) -> None:
    """Every decoding row samples, and so may the prompt's row, if there is one."""
    model = Asked()
    tokens = ItlBound(0.2, model).prompt_tokens(np.array(kv_len), 40, 1000)
    ones, prompts = [1] * len(kv_len), [counts[-1] for counts, _, sampled in model.shapes if sampled > len(kv_len)]
    assert model.shapes[0] == (ones, kv_len, len(kv_len))
    assert model.shapes[1:] == [([*ones, n], [*kv_len, 40 + n], len(kv_len) + 1) for n in prompts]
    assert LEAST < tokens < 1000
    assert len(prompts) > 2


def test_without_a_target_nothing_is_bounded() -> None:
    assert ItlBound(None, Linear(1.0, 1.0, 1.0)).prompt_tokens(np.ones(9), 0, 16_384) == 16_384


@pytest.mark.parametrize("model", [None, Linear(0.002, 1e-5, 0)], ids=["no model", "a model that is too optimistic"])
def test_what_steps_took_corrects_what_the_model_says(model: Linear | None) -> None:
    """The device needs five times as long, and the bound finds that out from the steps it makes."""
    device = Linear(0.01, 5e-5, 0)
    bound, rows = ItlBound(0.05, model), 16
    for _ in range(100):
        tokens = bound.prompt_tokens(np.full(rows, 100), 0, 16_384)
        bound.note(_plan(rows, tokens), device.step_limit(StepShape([1] * rows + [tokens], [100] * rows + [tokens], 0)))
    took = device.step_limit(StepShape([1] * rows + [tokens], [1], 0))
    assert 0.035 < took <= 0.0525


def _plan(rows: int, tokens: int) -> StepPlan:
    counts = np.array([1] * rows + [tokens], np.int32)
    kinds = np.array([RowKind.TOKEN] * rows + [RowKind.CHUNK], np.int8)
    made = Rows(counts, counts, kinds, counts, np.ones_like(counts), 0, Feature.NONE, 0)
    return StepPlan(1, made, np.array([100] * rows + [tokens], np.int32))


def test_a_long_prompt_comes_in_pieces_beside_who_decodes_and_whole_where_nobody_does() -> None:
    desk = Desk(pages=999, budget=4096)
    desk.scheduler._itl = ItlBound(0.025, Linear(0.001, 1e-4, 0))
    prompt = tuple(1 + n * n % 3 for n in range(500))
    alone, decoding, long = (
        make_request("alone", prompt),
        make_request("decoding", (1, 2)),
        make_request("long", prompt[1:]),
    )
    desk.add(alone)
    plan = desk.submit()
    assert plan is not None
    assert plan.num_tokens == 500
    desk.finish()
    desk.add(decoding)
    desk.submit(), desk.deliver()
    desk.add(long)
    plan = desk.submit()
    assert plan is not None
    assert plan.num_tokens == 128  # 0.025 s are 182 tokens at the first guess, and these hold one tile
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in (alone, decoding, long)}


def test_the_servers_target_follows_from_the_time_to_read_the_weights() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "models"
    large, small = (
        Roofline(read_model_config(folder / name).spec, find("H200").attained(), "bfloat16")
        for name in ("llama-8b", "qwen3-0.6b")
    )
    read = 2 * 8.03e9 / find("H200").attained().bandwidth
    target = choose_itl_target(None, large, interactive=True)
    assert target is not None
    assert 5 * read < target < 7 * read
    assert choose_itl_target(None, small, interactive=True) == 0.010
    assert choose_itl_target(None, large, interactive=False) is None
    assert choose_itl_target(None, None, interactive=True) is None
    assert choose_itl_target(25, None, interactive=False) == 0.025
    assert choose_itl_target(0, large, interactive=True) is None


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "20", True])
def test_a_target_is_a_time(wrong: object) -> None:
    with pytest.raises(InvalidConfig, match="itl_target must be a number of milliseconds"):
        LLMConfig(itl_target=wrong)  # type: ignore[arg-type]


def test_work_in_the_background_is_cut_for_others_and_cuts_nobody() -> None:
    desk = Desk(pages=999, budget=4096)
    desk.scheduler._itl = ItlBound(0.025, Linear(0.001, 1e-4, 0))
    prompt = tuple(1 + n * n % 3 for n in range(500))
    work = replace(make_request("work", prompt, max_tokens=50), priority=BACKGROUND)
    more = replace(make_request("more", prompt[2:]), priority=BACKGROUND)
    desk.add(work)
    plan = desk.submit()
    assert plan is not None
    assert plan.num_tokens == 128, "others may come while it runs"
    while not desk.got["work"]:
        desk.deliver()
        desk.submit()
    desk.add(more, asked := make_request("asked", prompt[1:]))
    plan = desk.submit()
    assert plan is not None
    assert plan.num_tokens >= 499, "who decodes in the background does not delay a prompt"
    assert desk.rows_of("more") == 0, "and nothing of the background makes its step longer"
    desk.finish()
    assert desk.got == {each.id: desk.alone(each) for each in (work, more, asked)}


@pytest.mark.parametrize(("longest", "first"), [(0, [40, 5]), (16, [16, 5]), (3, [3, 3])])
def test_a_step_runs_no_more_of_a_prompt_than_it_may(longest: int, first: list[int]) -> None:
    """So a short prompt behind a long one needs no step more."""
    desk = Desk(long_prefill_token_threshold=longest)
    desk.add(make_request("long", range(40), max_tokens=2), make_request("short", range(50, 55), max_tokens=2))
    plan = desk.submit()
    assert plan is not None
    assert plan.rows.num_tokens_R.tolist() == first
    desk.finish()
    assert {name: len(tokens) for name, tokens in desk.got.items()} == {"long": 2, "short": 2}
