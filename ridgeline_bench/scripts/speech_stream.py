"""Recognition of speech that is still being spoken: the delay of words, wrong words and computing time by chunk.

    python -m ridgeline_bench.scripts.speech_stream --espeak FOLDER [--chunks 0.25 0.5 1 2] [--sentences 40]
        [--noise 20] [--seed 0] [--output FILE.jsonl]

The model is `embedded-speech`, on this machine. Sentences, voices and noise are left out of its training; --espeak is a
folder as in `senses.speak`. Samples of a sentence come in chunks of so many seconds, as a microphone gives them. Its
encoder sees both ways, so a window has to be read again when it grows:

    growing   behind each chunk all of the sentence so far is transcribed
    alone     each chunk is transcribed by itself, and the texts are joined

    compute   ms of a transcription, from the chunk's last sample to its text: median and 99th percentile
    load      seconds of computing for a second of sound
    delay     seconds from a word's begin until it is shown for good, with the wait for the end of its chunk
    changed   words that were shown and that the last text has not in their place
    wrong     words inserted, left out or wrong in the last text
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.folder import ASSETS
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told
from ridgeline_bench.scripts.senses.hear import HEARD
from ridgeline_bench.scripts.senses.speak import noisy
from ridgeline_bench.scripts.senses.spoken import RATE, Espeak, error_rate
from ridgeline_bench.svg import Panel, picture

BEFORE = 0.5  # seconds of noise in front of a sentence, and behind it


class Said(NamedTuple):
    """samples_N: float32 at HEARD. begins: the second at which each word of the text begins, as far as it is known."""

    text: str
    samples_N: np.ndarray
    begins: tuple[tuple[float, int], ...]


class Shown(NamedTuple):
    """A text, the second of the sound at which it was asked for, and the seconds that it took."""

    text: str
    at: float
    took: float


def said(synthesiser: Espeak, count: int, noise: float, seed: int) -> list[Said]:
    random, found = Random(seed), list[Said]()
    torch.manual_seed(seed)
    for _ in range(count):
        each = synthesiser.speech(random, new_voice=True, new_text=True)
        begins = tuple((BEFORE + sample / RATE, word) for sample, word in each.begins)
        found.append(Said(each.text, noisy(each, noise).astype(np.float32) / 32768, begins))
    return found


def heard(llm: LLM, samples_N: np.ndarray, at: float) -> Shown:
    begun = time.perf_counter()
    text = llm.transcribe((samples_N, HEARD), language="en").text
    return Shown(text.strip().lower(), at, time.perf_counter() - begun)


def streamed(llm: LLM, one: Said, chunk: float) -> tuple[list[Shown], list[Shown]]:
    """Return the texts of a sentence that grows, and those of its chunks by themselves."""
    growing, alone, step = list[Shown](), list[Shown](), round(chunk * HEARD)
    for end in range(step, len(one.samples_N) + step, step):
        stop = min(end, len(one.samples_N))
        growing.append(heard(llm, one.samples_N[:stop], stop / HEARD))
        alone.append(heard(llm, one.samples_N[end - step : stop], stop / HEARD))
    return growing, alone


def delays(shown: list[Shown], begins: Iterable[tuple[float, int]]) -> list[float]:
    """Return the seconds from the begins of words until each is shown for good, for those that the last text has."""
    texts, found = [each.text.split() for each in shown], list[float]()
    for begin, word in begins:
        if word >= len(texts[-1]):
            continue
        first = len(shown) - 1
        while first and len(texts[first - 1]) > word and texts[first - 1][word] == texts[-1][word]:
            first -= 1
        found.append(shown[first].at + shown[first].took - begin)
    return found


def changed(shown: list[Shown]) -> tuple[int, int]:
    """Return the words that texts before the last one had and that this has not in their place, and all of theirs."""
    last, wrong, total = shown[-1].text.split(), 0, 0
    for each in shown[:-1]:
        words = each.text.split()
        wrong += sum(n >= len(last) or word != last[n] for n, word in enumerate(words))
        total += len(words)
    return wrong, total


def measured(llm: LLM, sentences: list[Said], chunk: float) -> dict[str, Any]:
    each = [streamed(llm, one, chunk) for one in sentences]
    took = [shown.took for growing, _ in each for shown in growing]
    sound = sum(len(one.samples_N) for one in sentences) / HEARD
    late = [delay for (growing, _), one in zip(each, sentences, strict=True) for delay in delays(growing, one.begins)]
    wrong, total = map(sum, zip(*(changed(growing) for growing, _ in each), strict=True))
    true = [one.text for one in sentences]
    return {
        "workload": "speech stream", "chunk_s": chunk, "sentences": len(sentences), "sound_s": sound,
        "compute_ms": [1e3 * float(np.percentile(took, q)) for q in (50, 99)], "load": sum(took) / sound,
        "alone_load": sum(shown.took for _, alone in each for shown in alone) / sound,
        "delay_s": [float(np.percentile(late, q)) for q in (50, 95)], "changed": wrong / max(total, 1),
        "wrong": error_rate([growing[-1].text for growing, _ in each], true),
        "alone_wrong": error_rate([" ".join(shown.text for shown in alone) for _, alone in each], true),
    }  # fmt: skip


def drawn(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw delay, load and wrong words over the chunks."""

    def curve(*keys: Any) -> list[tuple[float, float]]:
        found = list[tuple[float, float]]()
        for line in lines:
            value = line[keys[0]] if len(keys) == 1 else line[keys[0]][keys[1]]
            found.append((line["chunk_s"], float(value)))
        return sorted(found)

    panels = [
        Panel("delay of words, s", "chunk, s", {"median": curve("delay_s", 0), "95th percentile": curve("delay_s", 1)}),
        Panel("computing for a second, s", "chunk, s", {"growing": curve("load"), "alone": curve("alone_load")}),
        Panel("words wrong", "chunk, s", {"growing": curve("wrong"), "alone": curve("alone_wrong")}),
    ]
    path.write_text(picture(panels, "speech as it is spoken, by the length of a chunk"))


def main() -> None:
    a = asked(__doc__, espeak=Path, chunks=[0.25, 0.5, 1.0, 2.0], sentences=40, noise=20.0, seed=0, output="")
    with told():
        check_counts(a, "sentences")
        if a.espeak is None or min(a.chunks) < 0.1:
            raise InvalidConfig("--espeak names a folder with eSpeak NG, and --chunks have at least 0.1 s.")
        sentences = said(Espeak(a.espeak), a.sentences, a.noise, a.seed)
    print(" chunk s  compute ms    p99   load  delay s    p95  changed   wrong   alone")
    with LLM(ASSETS / "embedded-speech", device="cpu", enable_prefix_caching=False) as llm:
        heard(llm, sentences[0].samples_N, 0.0)
        for chunk in a.chunks:
            line = measured(llm, sentences, chunk)
            (median, most), (delay, late) = line["compute_ms"], line["delay_s"]
            shares = " ".join(f"{line[name]:>7.1%}" for name in ("changed", "wrong", "alone_wrong"))
            print(f"{chunk:>8} {median:>11.1f} {most:>6.0f} {line['load']:>6.2f} {delay:>8.2f} {late:>6.2f}  {shares}",
                  flush=True)  # fmt: skip
            keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
