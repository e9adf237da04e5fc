"""An encoder-decoder model over HTTP: a completion's prompt is what the encoder reads."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests import encoder_decoders as oracle
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

WORDS = [f"w{number}" for number in (9, 40, 41, 7, 250)]
IDS = [int(word[1:]) for word in WORDS]


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("t5")
    (home / "model").mkdir()
    folder = oracle.save("t5", home / "model")
    with (
        engine_in_a_thread(home / "engine", model=str(folder), max_num_seqs=4),
        start_server(folder, home / "engine") as found,
    ):
        yield found


def test_completions_equal_those_of_transformers(server: Server) -> None:
    """Texts and token ids, several in one request; tokens are told by their logprobs."""
    encoded = [*IDS, 1]
    given: tuple[str | list[int], ...] = (" ".join(WORDS), encoded)
    for prompt in given:
        answer = server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0, logprobs=1, extra_body={"ignore_eos": True}
        )
        decoded = list(oracle.start("t5"))
        assert answer.choices[0].logprobs is not None
        for logprob in answer.choices[0].logprobs.token_logprobs or ():
            want = oracle.logprobs(oracle.build("t5"), encoded, decoded)[-1]
            assert logprob is not None
            assert abs(float(want.max()) - logprob) < 2e-4
            decoded.append(int(want.argmax()))
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(encoded), 12)


@pytest.mark.parametrize(("side", "want"), [("left", [6, 7, 1]), ("right", [5, 6, 1])])
def test_a_text_that_is_cut_keeps_its_end(side: str, want: list[int], server: Server) -> None:
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
    answer = server.client.completions.create(model=MODEL, prompt="w5 w6 w7", max_tokens=1, extra_body=cut)
    assert answer.choices[0].model_dump()["prompt_token_ids"] == want


def test_a_text_may_be_cut_to_what_the_encoder_takes(server: Server) -> None:
    cut = {"truncate_prompt_tokens": -1}
    answer = server.client.completions.create(model=MODEL, prompt="w5 " * 200, max_tokens=90, extra_body=cut)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 96


def test_metrics_count_what_the_encoder_reads(server: Server) -> None:
    """Beside it the decoder runs its start."""

    def prompts() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))

    before = prompts()
    server.client.completions.create(model=MODEL, prompt=[9] * 50, max_tokens=2, temperature=0)
    assert server.wait_idle()
    assert prompts() - before == 51


def test_streams_say_the_same(server: Server) -> None:
    whole = server.client.completions.create(model=MODEL, prompt=" ".join(WORDS), max_tokens=12, temperature=0)
    pieces = server.client.completions.create(
        model=MODEL, prompt=[" ".join(WORDS)], max_tokens=12, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert server.wait_idle()


def test_a_prompt_may_be_as_long_as_the_encoder_takes_beside_any_output(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=[9] * 96, max_tokens=90, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 96
    with pytest.raises(openai.BadRequestError, match="your prompt has 97 tokens"):
        server.client.completions.create(model=MODEL, prompt=[9] * 97, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="decoder's start"):
        server.client.completions.create(model=MODEL, prompt=[9], max_tokens=96)


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"use_beam_search": True, "n": 2}, "beam search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(field: dict[str, object], named: str, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        server.client.completions.create(model=MODEL, prompt="w5", extra_body=field)


def test_chats_are_refused_without_a_template(server: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "w5"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    assert "template" in answer.json()["error"]["message"]
