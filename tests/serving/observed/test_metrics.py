"""The engine's figures against traffic that was counted by hand, and the page of metrics against Prometheus' parser."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.core.plan.request import Preemption, SamplingParams
from ridgeline.core.settings.rebalancing import Rebalanced
from ridgeline.core.settings.serving import ServeConfig
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import Overloaded
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http.operator import figures as dashboard_figures
from ridgeline.serving.http.operator import page_of_metrics, snapshot
from ridgeline.serving.observed import metrics
from ridgeline.serving.observed.counted import Counted
from ridgeline.serving.observed.engine_stats import EngineStats
from ridgeline.serving.observed.expert_figures import MOST_SERIES, metric_lines
from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.transport.messages import ExpertFigures, Gpu, RankFigures, Stats, StepFigures
from tests.api.conftest import write_tokenizer
from tests.driving import ask
from tests.serving.conftest import (
    MODEL,
    PATIENCE,
    engine_in_a_thread,
    open_api_server,
    start_engine,
    stop_engine,
    until_idle,
)
from tests.test_kv_disk import asked, served, written

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
PAGE = 114_688  # bytes of a block of 16 tokens of the embedded model in float32; the first of all is never used
ENGINE = {"model_name": MODEL, "engine": "0"}


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """An engine that no other test uses, with a cache that few requests fill."""
    with engine_in_a_thread(tmp_path / "engine", kv_cache_memory=25 * PAGE, max_num_seqs=8, max_model_len=350):
        yield tmp_path / "engine"


async def run(api: ApiServer, tokens: list[int], **params: object) -> Run:
    asked = GenerationRequest(id="x", prompt_token_ids=tokens, params=SamplingParams(**{"ignore_eos": True, **params}))
    async with api.service.run(asked) as running:
        await running.finish()
    return running


async def figures(api: ApiServer) -> Stats:
    stats = await api.client.ask()
    assert stats is not None
    return stats


def counts(stats: Stats) -> dict[str, int]:
    return {name: sum(found.counts) for name, found in stats.histograms.items()}


def parsed(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(page: dict[str, Metric], family: str, sample: str = "", **labels: str) -> float:
    """Of the one sample with these labels."""
    name = sample or family
    [found] = [s.value for s in page[family].samples if s.name == name and {**ENGINE, **labels} == s.labels]
    return found


def test_a_new_engine_has_counted_nothing(socket: Path) -> None:
    async def main() -> Stats:
        async with open_api_server(socket) as api:
            return await figures(api)

    stats = asyncio.run(main())
    assert not any(stats.counters.values())
    assert not any(counts(stats).values())
    assert (stats.steps, stats.step_seconds, stats.finished) == (0, 0.0, {})


def test_tokens_of_one_step_share_its_time() -> None:
    """So the times between tokens add up to the time that they took, however many drafts were right."""
    stats = EngineStats()
    for name in "ab":
        stats.note_arrival(ask(name, [1, 2]))
    for tokens, now in ((["a", "b"], 1.0), (["a", "b", "a", "a"], 1.3), (["b"], 1.4)):
        stats.note_tokens(tokens, now, lambda name: 0)
    found = stats._histograms["inter_token_latency_seconds"].message()
    assert sum(found.counts) == 5
    assert found.total == pytest.approx(0.3 + 0.3 + 0.1)


def test_vllms_names_of_the_tiers_below_count_what_moved(
    socket: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prompts run, come back from the host's memory, and, behind a restart, from the disk."""
    folder, told = tiny_model("llama"), list[Stats]()
    for _ in range(2):
        with served(folder, tmp_path / "kv") as own:
            for _ in range(2):
                asked(own)
            written(own)
            told.append(EngineStats().message(Counted(own.engine.scheduler.figures(), Headroom()), []))

    async def main() -> list[dict[str, Metric]]:
        async with open_api_server(socket) as api:
            return [parsed(metrics.render(snapshot(api, stats)).decode()) for stats in told]

    first, second = asyncio.run(main())
    for page in (first, second):
        queries, hits = (value(page, f"vllm:external_prefix_cache_{each}", f"vllm:external_prefix_cache_{each}_total")
                         for each in ("queries", "hits"))  # fmt: skip
        assert 0 < hits <= queries
        tiers = [
            value(page, "vllm:prompt_tokens_cached_by_source", "vllm:prompt_tokens_cached_by_source_total", source=tier)
            for tier in ("host", "disk")
        ]
        assert sum(tiers) == hits
        assert (tiers[1] > 0) == (page is second)
        for way in ("GPU_to_CPU", "CPU_to_GPU"):
            for what in ("bytes", "time"):
                name = f"vllm:kv_offload_total_{what}"
                assert value(page, name, f"{name}_total", transfer_type=way) > 0
        for name in ("load_bytes", "store_bytes"):
            assert value(page, f"vllm:kv_offload_{name}", f"vllm:kv_offload_{name}_total") > 0
        assert value(page, "vllm:kv_offload_cpu_cache_usage_perc") > 0
    tiering = "vllm:kv_offload_tiering_{}_bytes"
    assert value(first, tiering.format("write"), tiering.format("write") + "_total", tier="1:fs") > 0
    assert value(second, tiering.format("read"), tiering.format("read") + "_total", tier="1:fs") > 0


def test_a_step_has_the_tokens_that_vllm_counts() -> None:
    """Those it brought, and the prompts that it ended without what was cached; of a prompt's other steps nothing."""
    stats = EngineStats()
    stats.note_arrival(ask("a", list(range(100))))
    stats.note_arrival(ask("b", list(range(7))))
    for told in ([], ["a"], ["a", "b"], ["a", "a", "b"], []):
        stats.note_tokens(told, 1.0, {"a": 64, "b": 0}.__getitem__)
        stats.end_step()
    found = stats._histograms["iteration_tokens_total"].message()
    assert (sum(found.counts), found.total) == (3, (100 - 64 + 1) + (7 + 2) + 3)


def test_figures_of_known_traffic(socket: Path) -> None:
    """5 requests of 40 prompt tokens, which differ from the first token on, and 7 output tokens each."""

    async def main() -> tuple[Stats, str, list[Run]]:
        async with open_api_server(socket) as api:
            runs = await asyncio.gather(*(run(api, [n + 5] * 40, max_tokens=7) for n in range(5)))
            return await figures(api), (await page_of_metrics(api)).decode(), runs

    stats, text, runs = asyncio.run(main())
    assert stats.counters == {
        "prompt_tokens": 200,
        "generation_tokens": 35,
        "preemptions": 0,
        **{f"preemptions: {reason}": 0 for reason in Preemption},
        "prefix_cache_queries": 200,
        "prefix_cache_hits": 0,
        "kv_cache_saturated": 0,
        "prompt_tokens_cached": 0,
        "prompt_tokens_computed": 200,
    }
    assert stats.finished == {"length": 5}
    counted = counts(stats)
    steps = counted.pop("iteration_tokens_total")
    assert counted == {**dict.fromkeys(counted, 5), "inter_token_latency_seconds": 35 - 5}
    assert stats.steps >= steps >= 7
    # What each request's own stats say is what the histograms add up to.
    told = [run.endings[0].stats for run in runs if run.endings[0] is not None]
    total = {name: found.total for name, found in stats.histograms.items()}
    assert total["e2e_request_latency_seconds"] == pytest.approx(sum(s.finished - s.arrival for s in told))
    assert total["request_queue_time_seconds"] == pytest.approx(sum(s.first_scheduled - s.arrival for s in told))
    assert total["request_prompt_tokens"] == 200
    assert total["request_generation_tokens"] == 35
    assert total["iteration_tokens_total"] == 200 + 5 * 7
    assert total["time_to_first_token_seconds"] + total["inter_token_latency_seconds"] == pytest.approx(
        total["e2e_request_latency_seconds"], rel=0.05, abs=0.01
    )
    page = parsed(text)
    assert value(page, "vllm:prompt_tokens", "vllm:prompt_tokens_total") == 200
    assert value(page, "vllm:generation_tokens", "vllm:generation_tokens_total") == 35
    succeeded = "vllm:request_success_total"
    assert value(page, "vllm:request_success", succeeded, finished_reason="length") == 5
    assert value(page, "vllm:request_success", succeeded, finished_reason="abort") == 0
    generation = "vllm:request_generation_tokens"
    assert value(page, generation, f"{generation}_bucket", le="5.0") == 0
    assert value(page, generation, f"{generation}_bucket", le="10.0") == 5
    assert value(page, generation, f"{generation}_bucket", le="+Inf") == 5
    assert value(page, generation, f"{generation}_count") == 5
    assert value(page, generation, f"{generation}_sum") == 35
    assert value(page, "vllm:num_requests_running") == 0
    assert value(page, "ridgeline:engine_up") == 1


def test_what_requests_asked_for_and_where_their_tokens_came_from(socket: Path) -> None:
    """A prompt of 40 tokens twice, of which all but the last are found again; then three completions of one prompt;
    and one more than the queue takes."""

    async def main() -> tuple[Stats, str]:
        async with open_api_server(socket) as api:
            await run(api, [7] * 40, max_tokens=3)
            again = await run(api, [7] * 40, max_tokens=5)
            assert again.cached_tokens == 39
            await run(api, [9] * 10, max_tokens=4, n=3, temperature=1.0, seed=0)
            api.service.admission.max_requests = 2
            api.service.admission.open_requests = 2
            with pytest.raises(Overloaded):
                await run(api, [9] * 10, max_tokens=4)
            api.service.admission.open_requests = 0
            return await figures(api), (await page_of_metrics(api)).decode()

    stats, text = asyncio.run(main())
    page = parsed(text)
    totals = {name: (sum(found.counts), found.total) for name, found in stats.histograms.items()}
    assert totals["request_params_n"] == (3, 1 + 1 + 3)
    assert totals["request_max_num_generation_tokens"] == (3, 3 + 5 + 4)
    assert totals["request_params_max_tokens"] == (5, 3 + 5 + 3 * 4)
    assert totals["request_num_preemptions"] == (5, 0)
    computed = totals["request_prefill_kv_computed_tokens"]
    by_source = {
        source: value(page, "vllm:prompt_tokens_by_source", "vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    cached = value(page, "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_total")
    assert by_source == {"local_compute": computed[1], "local_cache_hit": cached, "external_kv_transfer": 0}
    assert sum(by_source.values()) == stats.counters["prompt_tokens"] == 110
    assert cached >= 39
    tiers = "vllm:prompt_tokens_cached_by_source"
    assert value(page, tiers, f"{tiers}_total", source="device") == stats.counters["prefix_cache_hits"]
    assert value(page, tiers, f"{tiers}_total", source="disk") == 0
    turned_away = {s.labels["reason"]: s.value for s in page["vllm:admission_rejections"].samples}
    assert turned_away == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 0}
    waiting = {s.labels["reason"]: s.value for s in page["vllm:num_requests_waiting_by_reason"].samples}
    assert waiting == {"capacity": 0, "deferred": 0}
    state = {s.labels["sleep_state"]: s.value for s in page["vllm:engine_sleep_state"].samples}
    assert state == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    for name in ("external_prefix_cache", "mm_cache"):
        for kind in ("queries", "hits"):
            assert value(page, f"vllm:{name}_{kind}", f"vllm:{name}_{kind}_total") == 0
    [sizes] = [sample.labels for sample in page["vllm:cache_config_info"].samples]
    assert sizes["kv_cache_memory_bytes"] == str(25 * PAGE)
    assert int(sizes["kv_cache_size_tokens"]) == int(sizes["num_gpu_blocks"]) * int(sizes["block_size"]) == 24 * 16
    assert float(sizes["kv_cache_max_concurrency"]) == pytest.approx(24 * 16 / 350, abs=0.01)
    assert sizes["gpu_memory_utilization"] == "0.9"


def test_the_prefix_cache_counts_each_prompt_once(socket: Path) -> None:
    async def main() -> tuple[Stats, Run]:
        async with open_api_server(socket) as api:
            await run(api, list(range(5, 45)), max_tokens=2)
            again = await run(api, list(range(5, 45)), max_tokens=2)
            return await figures(api), again

    stats, again = asyncio.run(main())
    assert stats.counters["prefix_cache_queries"] == 80
    assert stats.counters["prefix_cache_hits"] == again.cached_tokens == 39  # all but the last, which is run


@pytest.mark.dealt
@pytest.mark.usefixtures("crowded")
def test_preempted_requests_are_counted_and_their_own_blocks_are_no_hit(socket: Path) -> None:
    """8 requests that grow to 90 tokens each want 48 blocks of 16, and there are 24."""

    async def main() -> tuple[Stats, list[Run]]:
        async with open_api_server(socket) as api:
            runs = await asyncio.gather(*(run(api, [n + 5] * 30, max_tokens=60) for n in range(8)))
            return await figures(api), runs

    stats, runs = asyncio.run(main())
    told = [run.endings[0].stats for run in runs if run.endings[0] is not None]
    assert stats.counters["preemptions"] == sum(s.preemptions for s in told) > 0
    assert stats.counters["prompt_tokens"] == stats.counters["prefix_cache_queries"] == 240
    assert stats.counters["prefix_cache_hits"] == 0
    assert [s.cached_tokens for s in told] == [0] * 8
    assert counts(stats)["time_to_first_token_seconds"] == 8
    assert counts(stats)["inter_token_latency_seconds"] == 8 * 59
    assert stats.pages_used == 0


def test_an_aborted_request_ends_as_such_and_has_only_the_times_it_reached(socket: Path) -> None:
    async def main() -> tuple[Stats, Stats]:
        async with open_api_server(socket) as api:
            await run(api, [7] * 8, max_tokens=2)
            before = await figures(api)
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            asked = GenerationRequest(id="left", prompt_token_ids=[9] * 8, params=params)
            async with api.service.run(asked) as running:
                await anext(aiter(running))
            assert await until_idle(api, PATIENCE)
            return before, await figures(api)

    before, after = asyncio.run(main())
    assert after.finished == {"length": 1, "abort": 1}
    assert (after.running, after.waiting, after.pages_used) == (0, 0, 0)
    assert counts(after)["e2e_request_latency_seconds"] == 2
    generated = after.counters["generation_tokens"] - before.counters["generation_tokens"]
    assert 0 < generated < 300
    firsts = counts(after)["time_to_first_token_seconds"] - counts(before)["time_to_first_token_seconds"]
    gaps = counts(after)["inter_token_latency_seconds"] - counts(before)["inter_token_latency_seconds"]
    assert (firsts, gaps) == (1, generated - 1)


def test_the_page_outlives_the_engine(tmp_path: Path) -> None:
    async def main() -> tuple[str, str]:
        process = start_engine(tmp_path / "engine")
        try:
            async with open_api_server(tmp_path / "engine") as api:
                await run(api, [7] * 8, max_tokens=4)
                await figures(api)
                stop_engine(process)
                async with asyncio.timeout(PATIENCE):
                    while api.client.facts is not None:
                        await asyncio.sleep(0.01)
                down = (await page_of_metrics(api)).decode()
                process = await asyncio.to_thread(start_engine, tmp_path / "engine", life=2)
                await asyncio.wait_for(api.client.wait_until_up(), PATIENCE)
                return down, (await page_of_metrics(api)).decode()
        finally:
            stop_engine(process)

    down, back = (parsed(text) for text in asyncio.run(main()))
    assert value(down, "ridgeline:engine_up") == 0
    assert value(down, "vllm:generation_tokens", "vllm:generation_tokens_total") == 4
    restarts = "ridgeline:engine_restarts", "ridgeline:engine_restarts_total"
    assert (value(down, *restarts), value(back, *restarts)) == (0, 1)
    assert value(back, "ridgeline:engine_up") == 1
    assert value(back, "vllm:generation_tokens", "vllm:generation_tokens_total") == 0


def shape(page: dict[str, Metric]) -> str:
    """Name, type and labels of each metric, as the golden file has them."""
    lines = []
    for family in page.values():
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        labels = sorted({label for sample in samples for label in sample.labels} - {"le"})
        name = samples[0].name if samples and family.type == "counter" else family.name
        lines.append(f"{name} {family.type} {{{','.join(labels)}}}")
    return "\n".join(sorted(lines)) + "\n"


def complete(api: ApiServer, stats: Stats) -> metrics.Snapshot:
    """What a page says on a machine whose GPU and limits are known."""
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    gpu = Gpu(
        index=0, name="H", utilization=0.5, memory_used=1 << 30, memory_total=2 << 30, power=300.0, temperature=50.0
    )
    step = StepFigures(at=1.0, seconds=0.002, limit=0.001, decode_rows=1, prefill_rows=0, tokens=1)
    known = {"gpus": [gpu], "recent": [step] * 3, "experts": told([[3, 1], [2, 2]]), "saturations": 5}
    states = {"checkpoints: made": 3, "checkpoints: evicted": 1, "checkpoints: used": 7, "checkpoints: kept": 2}
    of_policy = {
        "service: a": 1.5,
        "lengths: outputs": 2,
        "lengths: error_tokens": 9,
        "slo: refused": 1,
        "slo: missed": 1,
    }
    known["counters"] = {
        **fields["counters"],
        **states,
        **{f"policy: {name}": value for name, value in of_policy.items()},
        **{f"rebalanced: {name}": value for name, value in Rebalanced(4, 20, 1 << 20, 1.5, 1.25)._asdict().items()},
        **{f"encoder: {name}": 2 for name in ("pictures", "patches", "seconds")},
        **{f"pictures: {name}": 1 for name in ("queries", "hits", "waiting")},
        "adapters: places": 2,
        "adapter requests: a": 3,
        "prefix_cache_hits: kv": 40,
        "prefix_cache_hits: recurrent": 30,
        **{
            f"drafts: {name}": 9
            for name in ("drafts", "draft_tokens", "accepted_tokens", "seconds_saved", "accepted_tokens_per_pos: 0")
        },
        **{
            f"below: {name}": 6
            for name in (*metrics.BELOW, *metrics.TIERING, "disk_bytes", "queried", "hit", "used", "size")
        },
    }
    known["ranks"] = [RankFigures(rank, 0.5 + rank, 1.5 - rank, 0.25) for rank in range(2)]
    whole = Stats(**{**fields, **known})
    return replace(snapshot(api, whole), price_per_hour=7.2, now=whole.started + 1800)


def told(tokens: list[list[int]], reached: int = 1) -> ExpertFigures:
    rows = np.array(tokens, np.int64)
    layers, experts = rows.shape
    return ExpertFigures(
        layers=[2 * layer + 1 for layer in range(layers)],
        experts=[experts] * layers,
        tokens=rows.tobytes(),
        reached=[reached] * layers,
    )


def test_of_a_mixture_every_layer_and_expert_is_told(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """3 requests of 20 prompt tokens and 5 output tokens each: 24 tokens run, each with 2 of 8 experts in 2 layers."""
    folder = tmp_path / "mixture"
    shutil.copytree(tiny_model("qwen3_moe"), folder)
    write_tokenizer(folder)

    async def main() -> tuple[str, dict[str, Any]]:
        async with open_api_server(tmp_path / "engine") as api:
            await asyncio.gather(*(run(api, [n + 5] * 20, max_tokens=5) for n in range(3)))
            assert await until_idle(api, PATIENCE)
            return (await page_of_metrics(api)).decode(), await dashboard_figures(api, 0.0, 0.0)

    with engine_in_a_thread(tmp_path / "engine", model=str(folder)):
        text, shown = asyncio.run(main())
    page, load = parsed(text), shown["figures"]["experts"]
    samples = page["ridgeline:expert_tokens"].samples
    assert [(s.labels["layer"], s.labels["expert"]) for s in samples] == [
        (str(i), str(e)) for i in (0, 1) for e in range(8)
    ]
    counts = np.array([s.value for s in samples]).reshape(2, 8)
    assert counts.sum(1).tolist() == [2 * 3 * 24] * 2
    assert load["tokens"] == counts.tolist()
    for layer, row in enumerate(counts):
        imbalance = value(page, "ridgeline:experts_imbalance", layer=str(layer))
        assert imbalance == load["imbalance"][layer] == pytest.approx(row.max() / row.mean())
        assert 2 <= value(page, "ridgeline:experts_reached", layer=str(layer)) <= 8
    assert value(page, "ridgeline:expert_dropped_tokens", "ridgeline:expert_dropped_tokens_total") == 0


def test_neighbours_are_one_series_where_there_are_too_many() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1000, size=(100, 1000)).tolist()
    lines = list(metric_lines(told(tokens), {"model_name": 'a "b"\\', "engine": "0"}))
    [family] = text_string_to_metric_families("\n".join(lines) + "\n")
    assert len(family.samples) == 100 * 250 <= MOST_SERIES
    [found] = [s for s in family.samples if s.labels["layer"] == "7" and s.labels["expert"] == "8-11"]
    assert found.value == sum(tokens[3][8:12])
    assert found.labels["model_name"] == 'a "b"\\'
    assert sum(s.value for s in family.samples) == sum(map(sum, tokens))


def test_no_series_is_of_experts_that_there_are_not() -> None:
    """The last of the neighbours, and a layer with fewer experts than the largest, whose row ends in zeros."""
    figures = msgspec.structs.replace(told([[1] * 1001] * 100), experts=[1001] * 99 + [6])
    lines = list(metric_lines(figures, {"engine": "0"}))
    [family] = text_string_to_metric_families("\n".join(lines) + "\n")
    names = {
        layer: [s.labels["expert"] for s in family.samples if s.labels["layer"] == layer] for layer in ("1", "199")
    }
    assert names["1"][:2] + names["1"][-2:] == ["0-3", "4-7", "996-999", "1000"]
    assert names["199"] == ["0-3", "4-5"]


def test_names_types_and_labels_are_those_of_the_golden_file(socket: Path) -> None:
    async def main() -> tuple[str, str]:
        async with open_api_server(socket, ServeConfig(generation_config="none", price_per_hour=2.0)) as priced:
            page = parsed((await page_of_metrics(priced)).decode())
            assert value(page, "ridgeline:price_per_hour") == 2.0
            assert 0 < value(page, "ridgeline:cost", "ridgeline:cost_total") < 2.0, "the engine is not an hour old"
            assert page["ridgeline:cost_per_million_tokens"].samples == [], "there are no tokens yet"
        async with open_api_server(socket) as api:
            await run(api, [7] * 8, max_tokens=4)
            real = (await page_of_metrics(api)).decode()
            return real, metrics.render(complete(api, await figures(api))).decode()

    real, full = asyncio.run(main())
    assert "expert" not in real, "the embedded model has none"
    assert shape(parsed(full)) == GOLDEN.read_text(), "names that others read have changed"
    golden = dict(line.split(" ", 1) for line in GOLDEN.read_text().splitlines())
    assert [name for name in re.findall(r"^# TYPE (\S+)", real, re.M) if name not in golden] == []
    for line in shape(parsed(real)).splitlines():
        name, rest = line.split(" ", 1)
        assert rest == golden[name] or rest.endswith("{}"), f"{line}, and the golden file has {golden[name]}"
    assert value(parsed(full), "ridgeline:headroom") == pytest.approx(0.5)
    assert "ridgeline:cost" not in real, "no price was given"
    assert value(parsed(full), "ridgeline:cost", "ridgeline:cost_total") == 3.6, "half an hour at 7.2"
    written = value(parsed(full), "vllm:generation_tokens", "vllm:generation_tokens_total")
    assert written == 4
    assert value(parsed(full), "ridgeline:cost_per_million_tokens") == pytest.approx(3.6 / 4 * 1e6)
    waited, caused = "ridgeline:rank_wait_seconds", "ridgeline:rank_waited_for_seconds"
    assert value(parsed(full), waited, f"{waited}_total", rank="1") == 1.5
    assert value(parsed(full), caused, f"{caused}_total", rank="1") == 0.5
    assert value(parsed(full), "ridgeline:rank_wait_share", rank="0") == 0.25
    assert "rank_wait" not in real, "one device waits for nobody"
    moved = "ridgeline:expert_moves"
    assert value(parsed(full), moved, f"{moved}_total") == 20
    assert value(parsed(full), "ridgeline:expert_busiest_rank_before") == 1.5
    assert value(parsed(full), "ridgeline:expert_busiest_rank_after") == 1.25
    place = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert value(parsed(full), place, f"{place}_total", position="0") == 9
    assert "spec_decode" not in real, "nobody makes drafts"
    saturated = "ridgeline:saturated_activations"
    assert value(parsed(full), saturated, f"{saturated}_total") == 5
    assert value(parsed(real), saturated, f"{saturated}_total") == 0


def test_every_bucket_of_the_page_is_a_bound(socket: Path) -> None:
    async def main() -> str:
        async with open_api_server(socket) as api:
            return (await page_of_metrics(api)).decode()

    page = parsed(asyncio.run(main()))
    for name, bounds in BOUNDS.items():
        samples = [s for s in page[f"vllm:{name}"].samples if s.name.endswith("_bucket")]
        assert [float(s.labels["le"]) for s in samples] == [*map(float, bounds), float("inf")]
