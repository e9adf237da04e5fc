"""Bits per byte are counted honestly, and what is exported is what was trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, normalizers

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.training.evaluate import bits_per_byte, windows, xz_bits_per_byte
from ridgeline.training.export import read_model, write_model
from tests.training.conftest import TEXTS


@torch.inference_mode()
def straightforward_bits(decoder: Decoder, ids: list[int]) -> float:
    """-log2 p of every token after the first, each given everything before it."""
    tokens = torch.tensor(ids)
    hidden = decoder(tokens[:-1], torch.arange(len(ids) - 1), DenseCausal(1))
    logprobs = decoder.logits(hidden).double().log_softmax(-1)
    return -logprobs.gather(1, tokens[1:, None]).sum().item() / math.log(2)


def test_bits_per_byte_equals_full_context_where_texts_fit_the_window(decoder: Decoder, tokenizer: Tokenizer) -> None:
    texts = ["é = 1\n", "def f(x):\n    return x\n"]
    score = bits_per_byte(decoder, tokenizer, texts, window=64, stride=16)
    encoded = [tokenizer.encode(text).ids for text in texts]  # the separator comes with it
    assert score.num_bytes == 7 + 23
    assert score.num_tokens == sum(map(len, encoded)) - 2
    # Both sum some twenty float32 log-probabilities; batching changes their rounding.
    assert score.bits == pytest.approx(sum(straightforward_bits(decoder, ids) for ids in encoded), rel=1e-6)


def test_long_texts_are_scored_with_overlapping_context(decoder: Decoder, tokenizer: Tokenizer) -> None:
    text = "".join(TEXTS[:3])
    ids = tokenizer.encode(text).ids
    bits, scored = 0.0, 0
    while scored < len(ids) - 1:
        end = min(len(ids) - 1, scored + 8 if scored else 32)
        part = ids[max(0, end - 32) : end + 1]
        keep = end - scored
        bits += straightforward_bits(decoder, part) - straightforward_bits(decoder, part[: len(part) - keep])
        scored = end
    assert bits_per_byte(decoder, tokenizer, [text], window=32, stride=8).bits == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 13, 50])
def test_windows_score_every_token_once(length: int) -> None:
    ids = np.arange(1, length + 1, dtype=np.uint16)
    cut = list(windows(ids, 10, 3))
    assert [t for w in cut for t in w.targets[w.first :]] == ids.tolist()
    assert all(w.first >= 7 for w in cut[1:])  # window - stride tokens of context
    assert all(np.array_equal(w.inputs, w.targets - 1) for w in cut)


def test_a_tokenizer_that_loses_text_is_refused(decoder: Decoder, tokenizer: Tokenizer) -> None:
    lossy = Tokenizer.from_str(tokenizer.to_str())
    lossy.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="does not reproduce"):
        bits_per_byte(decoder, lossy, ["Upper = 1\n"], window=64, stride=16)


def test_xz_sees_all_files_as_one_stream() -> None:
    assert xz_bits_per_byte(TEXTS) < xz_bits_per_byte(TEXTS[:1])


def test_an_exported_model_gives_equal_logits_in_transformers(
    decoder: Decoder, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with torch.no_grad():  # round as the export does, so that both sides hold the same numbers
        for parameter in decoder.parameters():
            parameter.copy_(parameter.bfloat16() + 0.05 * torch.randn_like(parameter).bfloat16())
            parameter.copy_(parameter.bfloat16())
    write_model(tmp_path, decoder, config, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    with torch.inference_mode():
        hidden = decoder(ids[0], torch.arange(ids.shape[1]), DenseCausal(1))
        # float32 throughout; logits are sums of 64 products after two layers of such sums.
        torch.testing.assert_close(decoder.logits(hidden), theirs(ids).logits[0], rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == 0


def test_an_exported_model_comes_back_in_bfloat16(
    decoder: Decoder, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_model(tmp_path, decoder, config, tokenizer)
    loaded = dict(read_model(tmp_path, torch.device("cpu")).named_parameters())
    assert all(torch.equal(loaded[name], p.bfloat16()) for name, p in decoder.named_parameters())
