"""A hybrid model over HTTP: chats go on from kept states, the counters say so, and aborts leave nothing held."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import write_tokenizer
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

TURNS, TOKENS = 10, 6


@pytest.fixture(scope="module")
def hybrid(
    tiny_model: Callable[[str], Path], start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a tiny hybrid, with blocks of 16 tokens and four requests at a time."""
    home = tmp_path_factory.mktemp("hybrid")
    folder = Path(shutil.copytree(tiny_model("qwen3_5"), home / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    write_tokenizer(folder)
    options = {"block_size": 16, "max_num_seqs": 4, "kv_cache_memory": 1 << 24}
    with (
        engine_in_a_thread(home / "engine", model=str(folder), **options),
        start_server(folder, home / "engine") as server,
    ):
        yield server


def counted(server: Server) -> dict[str, float]:
    """The figures of the page of metrics, those of single groups by `name group`."""
    assert server.wait_idle()
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name} {s.labels['group']}" if "group" in s.labels else s.name: s.value for s in samples}


def moved(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before.get(name, 0)


@pytest.mark.dealt
def test_every_turn_of_a_chat_goes_on_from_the_last_ones_state(hybrid: Server) -> None:
    hits, groups = "vllm:prefix_cache_hits_total", "ridgeline:prefix_cache_group_hits_total"
    said: list[dict[str, str]] = []
    known, held = 0, 0.0
    for turn in range(TURNS):
        said.append({"role": "user", "content": f"turn {turn}: where does the fox jump, then?"})
        before = counted(hybrid)
        answer = hybrid.client.chat.completions.create(
            model=MODEL, messages=said, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        after = counted(hybrid)
        usage = answer.usage
        assert usage is not None
        assert usage.completion_tokens == TOKENS
        found = moved(before, after, hits)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == found
        assert moved(before, after, "vllm:prefix_cache_queries_total") == usage.prompt_tokens
        # the template ends an answer with a line, so texts may be read as other tokens than those that were drawn
        assert found >= known // 16 * 16
        assert found > 0 or not turn
        for group in ("kv", "recurrent"):  # no group goes on where the others cannot, and each could go so far
            assert moved(before, after, f"{groups} {group}") >= found
        assert moved(before, after, "ridgeline:state_checkpoints_used_total") == (turn > 0)
        made = moved(before, after, "ridgeline:state_checkpoints_made_total")
        assert 1 <= made <= 3, "a prompt's end, an answer's, and a fork at most"
        assert after["ridgeline:state_checkpoints"] == after["ridgeline:state_checkpoints_made_total"]
        assert after["vllm:kv_cache_usage_perc"] == 0
        held, known = after["ridgeline:state_checkpoints"], usage.prompt_tokens - 1
        said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    assert held >= TURNS


@pytest.mark.dealt
def test_a_storm_of_aborts_leaves_no_block_held(hybrid: Server) -> None:
    """Requests that are left before, while and after they are answered, many of them with a beginning in common."""
    draw = random.Random(5)
    shared = [draw.randrange(3, 256) for _ in range(50)]
    asked = {"model": MODEL, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "prompt": shared}
    url = f"{hybrid.url}/v1/completions"
    first = httpx.post(url, json=asked, timeout=PATIENCE).json()["choices"][0]["text"]
    before = counted(hybrid)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        prompt = [*shared[: draw.choice((0, 17, 50))], *(draw.randrange(3, 256) for _ in range(draw.randint(1, 40)))]
        body = {**asked, "prompt": prompt, "max_tokens": 60, "stream": True}
        async with client.stream("POST", url, json=body) as answer:
            lines = aiter(answer.aiter_lines())
            for _ in range(draw.choice((0, 0, 1, 5, 20))):
                await anext(lines, None)

    async def storm() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            await asyncio.gather(*(leave(client, number) for number in range(48)))

    asyncio.run(storm())
    after = counted(hybrid)
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    made, gone, kept = (after[f"ridgeline:state_checkpoints{name}"] for name in ("_made_total", "_evicted_total", ""))
    assert made - gone == kept
    assert moved(before, after, "ridgeline:state_checkpoints_used_total") > 0
    again = httpx.post(url, json=asked, timeout=PATIENCE).json()["choices"][0]["text"]
    assert again == first
