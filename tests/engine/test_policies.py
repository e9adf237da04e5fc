"""What each policy promises, on devices that cost what the price says, checked from the plans alone."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import CannotPromise, InvalidConfig
from ridgeline.core.plan.request import Preemption, Request
from ridgeline.core.plan.step import Finish, RowKind, StepPlan, StepResult
from ridgeline.core.settings.config import EngineConfig
from ridgeline.core.settings.policies import PolicySettings, weights_of
from ridgeline.engine.lengths import Lengths
from ridgeline.engine.policy import POLICIES
from ridgeline.engine.price import Price, price_of
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sequence import Status
from ridgeline.kernels.base.cost import StepShape
from tests.engine.desk import Desk, make_request
from tests.engine.layouts import layout_of
from tests.engine.profiles import quick_settings

TENANTS = ("vtc", "drr", "dlpm")


def cost_of(price: Price, plan: StepPlan) -> list[float]:
    """The price of each row, one after the other."""
    costs = []
    for kind, tokens, end in zip(plan.rows.kinds_R, plan.rows.num_tokens_R, plan.kv_bound_R, strict=True):
        if kind == RowKind.CHUNK:
            costs.append(sum(price.token + price.pair * (end - tokens + n + 0.5) for n in range(tokens)))
        else:
            costs.append(price.row + price.cached * end)
    return costs


class Device:
    """A scheduler on a virtual clock, whose steps take as long as their rows cost. Requests stop where `ends` says.

    firsts, done: when each request had its first token, and its last.
    """

    def __init__(
        self,
        policy: str,
        price: Price,
        *,
        slots: int = 8,
        budget: int = 64,
        pages: int = 4000,
        takes: Callable[[StepPlan], float] | None = None,
        **terms: Any,
    ) -> None:
        self.now, self.price = 0.0, price
        self.takes = takes or (lambda plan: self.cost)  # milliseconds
        sizes = {"max_model_len": 4096, "max_num_seqs": slots, "max_num_batched_tokens": budget}
        config = EngineConfig(**sizes, scheduling_policy=policy, policy=PolicySettings(**terms), lookahead_depth=1)
        self.scheduler = Scheduler(config, layout_of(((None, 1),), 16, pages), None, lambda: self.now)
        self.scheduler._policy.price = price
        self.firsts: dict[str, float] = {}
        self.done: dict[str, float] = {}
        self.came: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.plans: dict[str, int] = Counter()
        self.spent = Counter[str]()
        self.cost = 0.0
        self.scheduler.on_finish = lambda request, stats: self.done.setdefault(request.id, self.now)

    def add(self, request: Request) -> None:
        self.came[request.id] = self.now
        self.scheduler.add(replace(request, arrival=self.now))

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        seqs, costs = self.scheduler.in_flight[-1].seqs, cost_of(self.price, plan)
        self.cost = sum(costs)
        for seq, cost in zip(seqs, costs, strict=True):
            self.spent[seq.request.owner] += cost
            self.began.setdefault(seq.id, self.now)
        for request_id in self.came.keys() - self.firsts.keys():
            self.plans[request_id] += 1
        self.now += 1e-3 * self.takes(plan)
        emitted_R = plan.rows.num_logits_R.astype(np.int32)
        finish_R = np.zeros(len(seqs), np.int8)
        for row, seq in enumerate(seqs):
            if emitted_R[row] and len(seq.tokens) + 1 >= seq.request.max_total_tokens:
                finish_R[row] = Finish.LENGTH
        tokens_RK = np.where(emitted_R > 0, 5, -1).astype(np.int32)[:, None]
        result = StepResult(plan_id=plan.id, tokens_RK=tokens_RK, emitted_R=emitted_R, finish_R=finish_R)
        for seq in [seq for row, seq in enumerate(seqs) if emitted_R[row]]:
            self.firsts.setdefault(seq.id, self.now)
        list(self.scheduler.update(result))
        return True

    def run(self, arrivals: list[tuple[float, Request]], until: float = float("inf")) -> None:
        """Let requests come when it is their time. Those that are refused are not in `firsts`."""
        waiting = deque(sorted(arrivals, key=lambda each: each[0]))
        while (waiting or self.scheduler.has_work) and self.now < until:
            while waiting and waiting[0][0] <= self.now:
                with suppress(CannotPromise):
                    self.add(waiting.popleft()[1])
            if not self.step() and waiting:
                self.now = max(self.now, waiting[0][0])


def owned(owner: str, name: str, prompt: int, output: int, **more: Any) -> Request:
    tokens = tuple(1 + hash((name, n)) % 1000 for n in range(prompt))
    return replace(make_request(name, tokens, max_tokens=output), owner=owner, **more)


# ---- tenants ----------------------------------------------------------------------------------------------------


@quick_settings(60)
@given(
    policy=st.sampled_from(TENANTS),
    drawn=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 150), st.integers(1, 40), st.integers(0, 4)),
        min_size=4,
        max_size=40,
    ),
    slots=st.integers(1, 6),
    budget=st.integers(8, 64),
    price=st.builds(
        Price, st.floats(0.5, 5), st.floats(0, 0.02), st.floats(0.05, 1), st.floats(0, 1e-3)
    ),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)  # fmt: skip
def test_two_tenants_that_wait_are_never_apart_by_more_than_a_step_and_the_dearest_prompt(
    policy, drawn, slots, budget, price, weight
) -> None:
    """At every step, for every pair, in predicted milliseconds divided by the weight, counted from the plans. A pair is
    followed from the step at which both wait; a tenant brings no credit, and debt of one prompt at most."""
    device = Device(policy, price, slots=slots, budget=max(budget, slots), tenant_weights={"a": weight})
    weights = Counter({"a": weight, "b": 1.0, "c": 1.0})
    counts: dict[tuple[str, str], float] = {}
    dearest, most_step = 0.0, 0.0

    def asking(scheduler: Scheduler) -> set[str]:
        return {seq.request.owner for seq in scheduler._by_id.values() if seq.status is Status.WAITING}

    queue = deque((owned(owner, f"{n}", *sizes), pause) for n, (owner, *sizes, pause) in enumerate(drawn))
    pause = 0
    for _ in range(6000):
        while queue and pause <= 0:
            request, pause = queue.popleft()
            dearest = max(dearest, price.prompt(len(request.prompt_token_ids)))
            device.add(request)
        pause -= 1
        scheduler, before = device.scheduler, Counter(device.spent)
        held = {seq.request.owner: scheduler._policy.spent_T[seq.tenant] for seq in scheduler._by_id.values()}
        waits = asking(scheduler)
        pairs = {(a, b) for a in waits for b in waits if a < b}
        counts = {pair: counts.get(pair, held[pair[0]] - held[pair[1]]) for pair in pairs}
        if not device.step():
            if not scheduler.has_work and not queue:
                break
            continue
        most_step = max(most_step, device.cost / min(1.0, weight))
        for a, b in counts:
            counts[a, b] += (device.spent[a] - before[a]) / weights[a] - (device.spent[b] - before[b]) / weights[b]
            assert abs(counts[a, b]) <= dearest + most_step + 1e-6
        waits = asking(scheduler)  # one that had nothing to wait for until the next request came begins anew
        counts = {(a, b): count for (a, b), count in counts.items() if a in waits and b in waits}
    else:
        raise AssertionError("requests wait for ever")
    assert len(device.done) == len(drawn)


@cache
def flooded(policy: str, flood: int, price: Price) -> tuple[float, float, float]:
    """The 99th percentile of the calm tenant's first tokens in ms, the longest step, and milliseconds of service for
    each millisecond, over a fixed time. A calm request each 60 ms; the other tenant has as many times `flood`."""
    device = Device(policy, price, slots=16, budget=256)
    calm = [(0.06 * n, owned("calm", f"c{n}", 40, 16)) for n in range(200)]
    noise = [(0.06 * n / flood, owned("loud", f"l{n}", 40, 16)) for n in range(200 * flood)] if flood else []
    longest = 0.0
    step = device.step

    def watched() -> bool:
        nonlocal longest
        ran = step()
        longest = max(longest, device.cost)
        return ran

    device.step = watched  # type: ignore[method-assign]
    device.run(calm + noise, until=12.0)
    waits = sorted(device.firsts[r.id] - at for at, r in calm if r.id in device.firsts)
    assert len(waits) >= 195
    tokens = sum(len(seq.output) for seq in device.scheduler._by_id.values()) + 16 * len(device.done)
    return 1e3 * waits[int(0.99 * len(waits))], longest, tokens / device.now


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("policy", TENANTS)
def test_a_tenant_that_floods_ten_times_as_much_hardly_delays_another(policy: str) -> None:
    price = Price(row=0.4, cached=0.0005, token=0.1, pair=0.0)
    alone, _, _ = flooded(policy, 0, price)
    beside, step, tokens = flooded(policy, 10, price)
    _, _, usual = flooded("fcfs", 10, price)
    assert beside <= 1.3 * alone + 2 * step
    assert tokens >= 0.97 * usual


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", TENANTS)
def test_tenants_whose_steps_cost_more_than_any_prompt_do_not_preempt_each_other_at_every_step(policy: str) -> None:
    """Twenty backlogged tenants with short prompts and long outputs, 64 rows in a step."""
    device = Device(policy, Price(row=0.05, token=0.01), slots=64, budget=512)
    for n in range(400):
        device.add(owned(f"t{n % 20}", f"{n}", 30, 200))
    steps = 0
    while device.step() and steps < 600:
        steps += 1
    assert device.scheduler.preemptions[Preemption.PRIORITY] <= 4 * steps


@pytest.mark.parametrize("policy", TENANTS)
def test_a_tenant_that_comes_to_a_full_engine_gets_half_of_it_and_no_more_is_preempted(policy: str) -> None:
    device = Device(policy, Price(row=0.05, token=0.01), slots=64, budget=4096)
    for n in range(300):
        device.add(owned("first", f"a{n}", 30, 300))
    for _ in range(50):
        device.step()
    for n in range(300):
        device.add(owned("second", f"b{n}", 30, 300))
    before = Counter(device.spent)
    for _ in range(200):
        device.step()
    gained = {owner: device.spent[owner] - before[owner] for owner in ("first", "second")}
    assert gained["second"] == pytest.approx(gained["first"], rel=0.1)
    assert device.scheduler.preemptions[Preemption.PRIORITY] <= 64 + 0.25 * 200


@pytest.mark.parametrize("policy", [*TENANTS, "srpt"])
def test_a_step_that_fails_is_service_for_nobody(policy: str) -> None:
    device = Device(policy, Price(row=0.5, token=0.1), slots=4, budget=64)
    for n in range(6):
        device.add(owned("ab"[n % 2], f"{n}", 30, 20))
    for _ in range(3):
        device.step()
    scheduler = device.scheduler
    made: Any = scheduler._policy

    def counts() -> list[float]:
        return list(made.spent_T) if policy != "srpt" else [made._served]

    before = counts()
    plan = scheduler.schedule()
    assert plan is not None
    assert sum(counts()) > sum(before)
    list(scheduler.update(StepResult(plan_id=plan.id, error="the device is gone")))
    assert counts() == pytest.approx(before)
    device.spent.clear()
    shown = sum(made.figures().values())
    while device.step():
        pass
    assert len(device.done) == 6
    if policy != "srpt":
        assert sum(made.figures().values()) <= shown + device.spent.total() + 1e-9, "counts are those of steps that ran"


def test_figures_show_tenants_and_no_addresses() -> None:
    device = Device("vtc", Price(), slots=4, tenant_weights={"10.0.0.1": 3.0})
    for owner in ("@10.0.0.1", "@10.0.0.2", "acme"):
        device.add(owned(owner, owner, 5, 5))
    while device.step():
        pass
    assert set(device.scheduler._policy.figures()) == {"service: no key", "service: acme"}
    made: Any = device.scheduler._policy
    assert made._weight_T[1:3].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_a_request_comes_as_quickly_beside_many_owners_that_wait(policy: str) -> None:
    """The list of all owners is not made anew for each one that comes."""
    device = Device(policy, Price(), slots=1)
    for n in range(3000):
        device.add(owned(f"o{n}", f"{n}", 1, 4))
    built = 0
    made = device.scheduler._policy
    name = "_next" if policy == "fcfs" else "_numbers"
    for n in range(500):
        before = id(getattr(made, name))
        device.add(owned(f"p{n}", f"p{n}", 1, 4))
        built += id(getattr(made, name)) != before
    assert built <= 1


def test_weights_are_shares_of_service() -> None:
    device = Device("vtc", Price(), slots=4, tenant_weights={"a": 3.0})
    for n in range(300):
        for owner in "ab":
            device.add(owned(owner, f"{owner}{n}", 20, 20))
    for _ in range(1500):
        device.step()
    assert device.spent["a"] / device.spent["b"] == pytest.approx(3, rel=0.05)


def test_within_its_turn_a_tenant_has_prompts_first_that_begin_like_the_last_ones() -> None:
    """Six groups of prompts, one after the other in time, on a small cache: more of them hit than in order."""
    found = {}
    for policy in ("drr", "dlpm"):
        device = Device(policy, Price(token=1.0, row=1.0), slots=2, budget=256, pages=30)
        for n in range(48):
            beginning = tuple(1 + hash((n % 6, m)) % 1000 for m in range(130))
            device.add(replace(make_request(f"{n}", (*beginning, n, n + 1), max_tokens=2), owner="ab"[n % 2]))
        while device.step():
            pass
        assert len(device.done) == 48
        found[policy] = device.scheduler.cache.hit_tokens
    assert found["dlpm"] > 1.5 * found["drr"]


# ---- others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["priority"])
def test_the_highest_priority_has_its_first_token_two_steps_after_its_own_prefill(policy: str) -> None:
    device = Device(policy, Price(), slots=8, budget=64)
    for n in range(200):
        device.add(owned("", f"{n}", 100, 50, priority=5))
    for _ in range(37):
        device.step()
    device.add(owned("", "high", 150, 5, priority=-1))
    while "high" not in device.firsts:
        device.step()
    assert device.plans["high"] <= 2 + -(-150 // (64 - 8))


def test_a_low_priority_rises_while_it_waits() -> None:
    """A stream of others that keeps the device busy delays it by two levels' time, and no longer."""
    device = Device("priority", Price(), slots=1, priority_aging=5.0)
    stream = [(0.02 * n, owned("", f"{n}", 10, 13, priority=0)) for n in range(1000)]
    device.run([(0.0, stream[0][1]), (0.001, owned("", "late", 10, 5, priority=2)), *stream[1:]], until=19)
    assert 10 <= device.firsts["late"] <= 10.2


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_the_shortest_first_waits_less_in_the_mean_and_none_more_than_four_times_as_long(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.choice([5, 200], 300, p=[0.8, 0.2])
    arrivals, at = [], 0.0
    for n, length in enumerate(lengths.tolist()):  # the class of a prompt tells its output's length
        at += float(draw.exponential(0.045))
        arrivals.append((at, owned("", f"{n}", 8 if length == 5 else 100, length)))
    waits = {}
    for policy in ("fcfs", "srpt"):
        device = Device(policy, Price(), slots=1, budget=128)
        device.run(arrivals)
        waits[policy] = np.array([device.began[r.id] - at for at, r in arrivals])
        assert len(device.done) == 300
    assert waits["srpt"].mean() < 0.7 * waits["fcfs"].mean()
    longest_step = 0.13
    running = 0.3  # a request that runs is not preempted
    assert (waits["srpt"] <= 4 * waits["fcfs"] + running + longest_step).all()


def test_lengths_are_learned_by_tenant_and_class_of_prompt() -> None:
    lengths, draw = Lengths(), np.random.default_rng(0)
    cases = {("a", 10): 40, ("a", 1000): 7, ("b", 10): 400}
    for _ in range(400):
        for (owner, prompt), mean in cases.items():
            request = owned(owner, "x", prompt, 2000)
            lengths.note(request, lengths.predicted(request), int(draw.lognormal(np.log(mean), 0.3)))
    for (owner, prompt), mean in cases.items():
        assert lengths.predicted(owned(owner, "x", prompt, 2000)) == pytest.approx(mean, rel=0.2)
    assert lengths.ended == 1200
    assert 0 < lengths.error / 1200 < 60
    assert lengths.predicted(owned("new", "x", 1000, 2000)) == pytest.approx(7, rel=0.3), "the class of all tenants"
    assert lengths.predicted(owned("b", "x", 10, 30)) == 30


def slow_and_dear(plan: StepPlan) -> float:
    """A device unlike its prices: a step takes 10 ms, a decoding row 3 ms and a prompt's token 0.5 ms."""
    chunks_R = plan.rows.kinds_R == RowKind.CHUNK
    return float(10 + 3 * (~chunks_R).sum() + 0.5 * plan.rows.num_tokens_R[chunks_R].sum())


def goodput(policy: str, rate: float, seconds: float = 40.0, slots: int = 32, takes: Any = None) -> float:
    """Requests a second whose first token came within half a second."""
    draw = np.random.default_rng(5)
    device = Device(policy, Price(row=0.5, token=0.1), slots=slots, budget=256, takes=takes, slo_ttft=0.5)
    arrivals, at, n = [], 0.0, 0
    while at < seconds:
        arrivals.append((at, owned("", f"{n}", int(draw.integers(50, 400)), 32)))
        at, n = at + float(draw.exponential(1 / rate)), n + 1
    device.run(arrivals, until=seconds)
    return sum(device.firsts.get(r.id, 9e9) - at <= 0.5 for at, r in arrivals) / seconds


def collapse(rates: list[float], *terms: Any) -> float:
    """The lowest of these rates at which first come, first served keeps less than four objectives of five."""
    return rates[bisect_left(rates, True, key=lambda rate: goodput("fcfs", rate, *terms) < 0.8 * rate)]


@pytest.mark.dealt
def test_objectives_are_kept_where_first_come_first_served_collapses() -> None:
    rate = 1.2 * collapse([10 * 1.1**n for n in range(20)], 20.0)
    assert goodput("slo", rate, 20.0) >= 1.5 * goodput("fcfs", rate, 20.0)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize("slots", [8, 32])
def test_objectives_are_kept_on_a_device_that_its_prices_do_not_describe(slots: int) -> None:
    """It is learned from the first steps what each really takes: eight seconds have fewer than forty requests."""
    rate = collapse([1.0 * 1.1**n for n in range(30)], 40.0, slots, slow_and_dear)
    for seconds in (8.0, 40.0):
        found = {name: goodput(name, 1.2 * rate, seconds, slots, slow_and_dear) for name in ("fcfs", "slo")}
        assert found["slo"] >= 1.5 * found["fcfs"]
        calm = {name: goodput(name, 0.7 * rate, seconds, slots, slow_and_dear) for name in ("fcfs", "slo")}
        assert calm["slo"] >= 0.8 * calm["fcfs"], "it refuses what would come in time"


def test_what_cannot_be_met_is_refused_with_what_could_be_promised() -> None:
    device = Device("slo", Price(), slots=2, slo_ttft=1.0)
    with pytest.raises(
        CannotPromise, match=r"within 1000 ms cannot be promised now; one within \d+ ms could"
    ) as failed:
        device.add(owned("", "long", 2000, 5))
    could = int(str(failed.value).split("within ")[2].split(" ")[0])
    assert failed.value.param == "slo_ttft_ms"
    assert failed.value.retry_after >= 1
    device.add(owned("", "patient", 2000, 5, slo_ttft=could / 1e3 + 1e-3))
    while device.step():
        pass
    assert device.firsts["patient"] <= could / 1e3


def test_a_promise_between_tokens_cuts_prompts() -> None:
    """Beside a request that was promised 150 ms between its tokens, steps are that long; without it they are full."""
    steps = {}
    for promised in (0.0, 0.15):
        device = Device("slo", Price(), slots=8, budget=1024, slo_ttft=60.0)
        device.add(owned("", "reader", 4, 40, slo_itl=promised))
        device.step()
        device.add(owned("", "long", 1000, 2))
        device.step()
        steps[promised] = device.cost
    assert steps[0.0] > 900
    assert steps[0.15] <= 150


# ---- all --------------------------------------------------------------------------------------------------------


def crowd(policy: str, waiting: int) -> Device:
    """256 requests that decode and others that wait, of 20 tenants."""
    device = Device(policy, Price(row=0.05, token=0.01), slots=256, budget=4096, pages=9000, slo_ttft=3600.0)
    device.add(owned("t0", "first", 8, 4000))
    for n in range(255):
        device.add(owned(f"t{n % 20}", f"r{n}", 8, 4000, slo_ttft=0.0))
    while device.scheduler.running.prefilling or device.scheduler.num_waiting:
        device.step()
    prompts = [tuple(range(n, n + 32)) for n in range(64)]
    for n in range(waiting):
        request = make_request(f"w{n}", prompts[n % 64], max_tokens=30)
        device.add(replace(request, owner=f"t{n % 20}", priority=n % 3))
    device.came.clear()
    return device


def microseconds(device: Device, steps: int) -> float:
    """The median time that a plan takes to make."""
    schedule, took = device.scheduler.schedule, list[float]()

    def timed() -> StepPlan | None:
        start = time.perf_counter()
        plan = schedule()
        took.append(time.perf_counter() - start)
        return plan

    device.scheduler.schedule = timed  # type: ignore[method-assign]
    for _ in range(steps):
        device.step()
    return 1e6 * median(took)


@pytest.mark.timing
@pytest.mark.parametrize("policy", [*POLICIES])
def test_a_plan_takes_as_long_beside_many_that_wait_as_beside_few(policy: str) -> None:
    few, many = (microseconds(crowd(policy, count), 200) for count in (10_000, 100_000))
    assert few <= 100
    assert many <= 1.5 * few + 20


@pytest.mark.parametrize("policy", [*POLICIES])
def test_a_plan_calls_few_functions_and_no_more_beside_many_that_wait(policy: str) -> None:
    """Counted, since other work on the machine does not change that. Half of the plans stay below the bound."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def counted(waiting: int) -> float:
        nonlocal calls
        device, found = crowd(policy, waiting), list[int]()
        schedule = device.scheduler.schedule

        def traced() -> StepPlan | None:
            nonlocal calls
            calls = 0
            sys.setprofile(note)
            try:
                return schedule()
            finally:
                sys.setprofile(None)
                found.append(calls)

        device.scheduler.schedule = traced  # type: ignore[method-assign]
        for _ in range(40):
            device.step()
        return median(found)

    few, many = counted(200), counted(1200)
    assert many <= 150
    assert many <= few + 50


def test_prices_are_those_of_the_steps_that_the_model_predicts() -> None:
    class Linear:
        def step_limit(self, shape: StepShape) -> float:
            tokens, ends = np.asarray(shape.num_tokens_R), np.asarray(shape.kv_len_R)
            return float((2e-6 * tokens + 1e-9 * ends + 3e-10 * tokens * (ends - tokens / 2)).sum())

    config = EngineConfig(max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=512)
    price = price_of(Linear(), config)
    assert price.output(100, 1) == pytest.approx(2e-3 + 1.3e-6 * 100.5, rel=0.01)
    assert price.prompt(512) == pytest.approx(1e3 * Linear().step_limit(StepShape([512], [512], 1)), rel=0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=-1", "'a=-1'"),
        ("a", "'a'"),
        ("=2", "'=2'"),
        ("a=nan", "nan"),
        ("a=1,a=2", "twice"),
        ("a=1e9", "from 0.001"),
    ],
)
def test_wrong_weights_are_one_sentence(text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        weights_of(text)
    assert weights_of("a=2, b=0.5") == {"a": 2, "b": 0.5}


@pytest.mark.parametrize("policy", [*POLICIES])
def test_on_a_small_cache_every_request_ends_whoever_is_preempted(policy: str) -> None:
    desk = Desk(pages=19, slots=4, scheduling_policy=policy, policy=PolicySettings(slo_ttft=3600))
    desk.scheduler.running.pressure.admits = lambda seqs, num_running, outranked: True  # type: ignore[method-assign]
    requests = [
        replace(make_request(f"{n}", (1 + n % 3, 2, n), max_tokens=30), owner="ab"[n % 2], priority=n % 2)
        for n in range(12)
    ]
    desk.add(*requests)
    desk.finish()
    assert desk.got == {request.id: desk.alone(request) for request in requests}
    assert desk.scheduler.preemptions[Preemption.BLOCKS] + desk.scheduler.preemptions[Preemption.PRIORITY] > 0
