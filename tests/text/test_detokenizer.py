"""Text given out piece by piece equals decoding everything at once, and ends at stop strings wherever they fall."""

from __future__ import annotations

import codecs
import os.path
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.plan.request import SamplingParams
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.stop_strings import StopMatcher
from ridgeline.text.tokenizer import Tokenizer

EVERY_FAMILY = settings(max_examples=300)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with more halves of characters, byte tokens and special tokens than chance would give."""
    everything = range(tokenizer.vocab_size + 2)
    partial = [i for i in everything if b"\xff" >= tokenizer.token_bytes(i)[:1] >= b"\x80"]
    odd = partial + sorted(tokenizer.special_ids)
    return st.lists(st.one_of(st.sampled_from(everything), st.sampled_from(odd)), max_size=40)


codecs.register_error("one for each", lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def whole_text(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """All at once. With byte fallback it is Python's UTF-8 that says what bytes are: where they are valid that is what
    the library says (and is compared here), and where they are not it loses the characters among them that are."""
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    if not tokenizer.uses_byte_fallback:
        return text
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    own = b"".join(map(tokenizer.token_bytes, kept)).decode(errors="one for each").removeprefix(" ")
    assert own == text or "\ufffd" in own
    return own


def added_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What prompt and output together add to the prompt's text."""
    before = whole_text(tokenizer, prompt, skip)
    after = whole_text(tokenizer, prompt + output, skip)
    return after[len(os.path.commonprefix((before, after))) :]  # noqa: RUF071


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@EVERY_FAMILY
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_full_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    prompt, output = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    pieces = stream(Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), prompt), output)
    assert "".join(pieces) == added_text(tokenizer, prompt, output, skip)


@EVERY_FAMILY
@given(text=st.text(max_size=60))
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(Detokenizer(tokenizer, SamplingParams(), []), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_over_three_tokens_comes_whole(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("🎃", add_special_tokens=False)
    assert len(ids) > 2
    assert [p for p in stream(Detokenizer(byte_level_tokenizer, SamplingParams(), []), ids) if p] == ["🎃"]


def test_a_character_begun_in_the_prompt_belongs_to_the_output(byte_level_tokenizer: Tokenizer) -> None:
    *start, last = byte_level_tokenizer.encode("x🎃", add_special_tokens=False)
    assert stream(Detokenizer(byte_level_tokenizer, SamplingParams(), start), [last]) == ["🎃", ""]


def test_the_first_space_goes_only_where_no_prompt_stands_before(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode("fox", add_special_tokens=False)
    prompt = byte_fallback_tokenizer.encode("The")
    assert "".join(stream(Detokenizer(byte_fallback_tokenizer, SamplingParams(), []), ids)) == "fox"
    assert "".join(stream(Detokenizer(byte_fallback_tokenizer, SamplingParams(), [1]), ids)) == "fox"
    assert "".join(stream(Detokenizer(byte_fallback_tokenizer, SamplingParams(), prompt), ids)) == " fox"


def test_the_stop_id_has_no_text_unless_asked_for(byte_level_tokenizer: Tokenizer) -> None:
    end = byte_level_tokenizer.encode("!", add_special_tokens=False)[0]
    for include in (False, True):
        params = SamplingParams(include_stop_str_in_output=include)
        detokenizer = Detokenizer(byte_level_tokenizer, params, [])
        assert detokenizer.push(end, is_stop=True) + detokenizer.finish() == ("!" if include else "")
        assert detokenizer.num_tokens == 1


def test_endless_garbage_costs_no_more_per_token(tokenizer: Tokenizer) -> None:
    continuation = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] >= b"\x80")

    def seconds(count: int) -> float:
        begin = time.process_time()
        stream(Detokenizer(tokenizer, SamplingParams(), []), [continuation] * count)
        return time.process_time() - begin

    assert seconds(20_000) < 40 * min(seconds(2_000) for _ in range(3)), "ten times as many, not a hundred times"


# Stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that ends first, the longest if several do."""
    hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(hits)[0], min(hits)[2]) if hits else None


STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500)
@given(pieces=st.lists(st.text("ab ", max_size=6)), stops=STOPS, keep=st.booleans())
def test_stops_are_where_find_says_however_the_text_is_cut(pieces: list[str], stops: list[str], keep: bool) -> None:
    matcher = StopMatcher(tuple(stops), keep_stop=keep)
    given_out = ""
    for piece in pieces:
        given_out += matcher.push(piece)
        if matcher.stop is not None:
            break
    given_out += matcher.finish()
    text = "".join(pieces)
    hit = first_stop(text, stops)
    if hit is None:
        assert (matcher.stop, given_out) == (None, text)
    else:
        end, stop = hit
        assert (matcher.stop, given_out) == (stop, text[: end if keep else end - len(stop)])


@EVERY_FAMILY
@given(data=st.data(), keep=st.booleans())
def test_stops_in_streams_of_tokens(tokenizer: Tokenizer, data: st.DataObject, keep: bool) -> None:
    output = data.draw(ids_of(tokenizer))
    text = whole_text(tokenizer, output)
    cuts = st.integers(0, max(len(text) - 1, 0)).flatmap(lambda i: st.integers(1, 6).map(lambda n: text[i : i + n]))
    stop = data.draw(cuts) or "never"
    params = SamplingParams(stop=stop, include_stop_str_in_output=keep)
    detokenizer = Detokenizer(tokenizer, params, [])
    shown = "".join(stream(detokenizer, output))
    at = text.find(stop)
    if at < 0:
        assert (detokenizer.stopped, detokenizer.at_token, shown) == (None, None, text)
        return
    assert (detokenizer.stopped, shown) == (stop, text[: at + len(stop) if keep else at])
    assert detokenizer.at_token is not None
    assert detokenizer.num_tokens == detokenizer.at_token <= len(output)
    if "\ufffd" not in stop:  # else half a character was held back
        assert stop not in whole_text(tokenizer, output[: detokenizer.at_token - 1])


@pytest.mark.parametrize("stop", ["\n", "🎃", "é\n", "b\n", "\n\n"])
def test_characters_spelled_in_bytes_end_a_text_at_their_last_byte(
    byte_fallback_tokenizer: Tokenizer, stop: str
) -> None:
    """Llama 2 and Mistral spell a newline as <0x0A>; it is text before the next token is known."""
    tokenizer = byte_fallback_tokenizer
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in f"ab{stop}".encode()]
    for include in (False, True):
        detokenizer = detokenizer_for(tokenizer, stop=stop, include_stop_str_in_output=include)
        pieces = [detokenizer.push(i) for i in ids]
        assert (detokenizer.stopped, detokenizer.at_token) == (stop, len(ids))
        assert "".join(pieces) == f"ab{stop}"[: None if include else f"ab{stop}".index(stop)]


def test_a_character_spelled_in_bytes_comes_with_its_last_byte(byte_fallback_tokenizer: Tokenizer) -> None:
    byte = {each: byte_fallback_tokenizer.backend.token_to_id(f"<0x{each:02X}>") for each in range(256)}
    detokenizer = detokenizer_for(byte_fallback_tokenizer)
    ids = [byte[each] for each in b"x\n\xf0\x9f\x8e\x83\xff\xe2\x82a"]
    assert stream(detokenizer, ids) == ["x", "\n", "", "", "", "🎃", "\ufffd", "", "", "\ufffd\ufffda", ""]


def detokenizer_for(tokenizer: Tokenizer, **params: Any) -> Detokenizer:
    return Detokenizer(tokenizer, SamplingParams(**params), [])


def test_what_may_become_a_stop_string_is_held_back(byte_level_tokenizer: Tokenizer) -> None:
    detokenizer = detokenizer_for(byte_level_tokenizer, stop=["abc"])
    ids = [byte_level_tokenizer.encode(c, add_special_tokens=False)[0] for c in "xabyab"]
    assert stream(detokenizer, ids) == ["x", "", "", "aby", "", "", "ab"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_special_token_whose_text_is_a_stop_string_stops(tokenizer: Tokenizer, keep: bool) -> None:
    """Although special tokens have no text: it is left out, or kept where stop strings are. Others stay hidden."""
    ids = tokenizer.encode("It rains", add_special_tokens=False)
    first, *others = sorted((tokenizer.special_ids & set(tokenizer.added.values())) - set(ids))
    text = next(text for text, number in tokenizer.added.items() if number == first)
    params = SamplingParams(stop=["zzz", text], include_stop_str_in_output=keep)
    detokenizer = Detokenizer(tokenizer, params, [])
    pieces = stream(detokenizer, [*ids, *others[:1], first, *ids])
    assert "".join(pieces) == whole_text(tokenizer, ids) + (text if keep else "")
    assert (detokenizer.stopped, detokenizer.at_token) == (text, len(ids) + len(others[:1]) + 1)


def test_nothing_comes_after_a_stop(byte_level_tokenizer: Tokenizer) -> None:
    detokenizer = detokenizer_for(byte_level_tokenizer, stop="b")
    ids = [byte_level_tokenizer.encode(c, add_special_tokens=False)[0] for c in "abab"]
    assert stream(detokenizer, ids) == ["a", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.at_token, detokenizer.num_tokens) == ("b", 2, 2)


@pytest.mark.parametrize("min_tokens", [3, 4])
def test_no_stop_before_min_tokens(byte_level_tokenizer: Tokenizer, min_tokens: int) -> None:
    detokenizer = detokenizer_for(byte_level_tokenizer, stop="b", min_tokens=min_tokens)
    ids = [byte_level_tokenizer.encode(c, add_special_tokens=False)[0] for c in "ababab"]
    assert "".join(stream(detokenizer, ids)) == "aba"
    assert detokenizer.at_token == 4


@pytest.mark.timing
@pytest.mark.parametrize("stops", [[], ["\n\n", "</tool>"]])
def test_a_token_costs_microseconds(byte_level_tokenizer: Tokenizer, stops: list[str]) -> None:
    ids = byte_level_tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)
    detokenizer = detokenizer_for(byte_level_tokenizer, stop=stops)
    begin = time.perf_counter()
    stream(detokenizer, ids)
    assert (time.perf_counter() - begin) / len(ids) < 100e-6  # about 3 µs where nothing else runs
