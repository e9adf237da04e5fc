"""Write sentences that are left out of training as files of sound, for `ridgeline transcribe`.

    python -m ridgeline_bench.scripts.senses.speak --espeak FOLDER --to FOLDER [--count 8] [--noise 15] [--join]
        [--seed 0]

--espeak is a folder with libespeak-ng.so.1 and espeak-ng-data, as the package espeakng-loader has it. The voices are
left out of training too. --to gets 0.ogg and so on and texts.json, which has each file's sentence. --noise is that of
speech over brown noise, in dB. --join writes one file, with half a second between sentences.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import av
import numpy as np
import torch

from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.senses.hear import HEARD, colored, resampled
from ridgeline_bench.scripts.senses.spoken import RATE, Espeak, SpokenSentence

HALF = RATE // 2  # samples of half a second


def noisy(speech: SpokenSentence, decibels: float) -> np.ndarray:
    """Return int16 samples at `HEARD` a second, with noise and half a second of it around."""
    given = np.pad(speech.samples_N.astype(np.float32), HALF)
    sound = resampled(torch.from_numpy(given)[None])[0]
    loud = sound.square().mean().sqrt()
    noise = colored(1, len(sound), 1.8, 2.2, torch.device("cpu"))[0]
    found = sound + loud * 10 ** (-decibels / 20) * noise
    return (found * (12_000 / found.abs().max())).numpy().astype(np.int16)


def write(file: Path, samples_N: np.ndarray) -> None:
    """Write mono samples as Opus."""
    with av.open(str(file), "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=HEARD, layout="mono", options={"b": "20000"})
        frame = av.AudioFrame.from_ndarray(samples_N[None], format="s16", layout="mono")
        frame.sample_rate = HEARD
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)


def main() -> None:
    given = asked(__doc__, espeak=Path, to=Path, count=8, noise=15.0, join=False, seed=0)
    synthesiser, random = Espeak(given.espeak), Random(given.seed)
    torch.manual_seed(given.seed)
    given.to.mkdir(parents=True, exist_ok=True)
    spoken = [synthesiser.speech(random, new_voice=True, new_text=True) for _ in range(given.count)]
    sounds, texts = [noisy(each, given.noise) for each in spoken], [each.text for each in spoken]
    if given.join:
        sounds, texts = [np.concatenate(sounds)], [" ".join(texts)]
    for number, sound in enumerate(sounds):
        write(given.to / f"{number}.ogg", sound)
    named = {f"{number}.ogg": text for number, text in enumerate(texts)}
    (given.to / "texts.json").write_text(json.dumps(named, indent=2) + "\n")


if __name__ == "__main__":
    with told():
        main()
