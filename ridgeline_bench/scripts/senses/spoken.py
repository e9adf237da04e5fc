"""Sentences of few words, and the voices of eSpeak NG that say them.

eSpeak NG is a synthesiser of formants under the GPL, version 3 or later. `pip install espeakng-loader` has its library
and its data; nothing of it is part of this project, and only its sound is learnt from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from ridgeline_bench.scripts.senses.split import held_out

RATE = 22050  # samples a second, of eSpeak NG
FORMS = (
    "turn {on} the {device} in the {room}", "turn {on} the {color} {device}", "please turn {on} all {device}",
    "set the {room} {device} to {color}", "set an alarm for {hour} {minute}", "wake me at {hour} {minute} on {day}",
    "what is the weather in {city} {day}", "is it going to rain in {city} on {day}", "book a train to {city} on {day}",
    "call {person}", "call {person} at {hour} {minute}", "send a message to {person}", "play some {music} music",
    "play {music} music in the {room}", "add {thing} to my list", "add {thing} and {thing} to the shopping list",
    "move {digit} steps {move}", "the code is {digit} {digit} {digit} {digit}", "open the door of the {room}",
    "{digit} {digit} {digit} {digit} {digit}", "how many {thing} do we need", "remind {person} to buy {thing}",
    "go {move} and then {move}", "stop the {music} music", "the {color} door is on the {move}",
)  # fmt: skip
LISTS = {
    "digit": "zero one two three four five six seven eight nine",
    "hour": "one two three four five six seven eight nine ten eleven twelve",
    "minute": "five ten fifteen twenty thirty forty fifty",
    "room": "kitchen bedroom bathroom garage garden office hall cellar",
    "device": "lights heating radio fan lamp television speaker printer",
    "color": "red green blue yellow orange purple white pink",
    "city": "london paris berlin madrid tokyo boston oslo rome cairo dublin",
    "day": "monday tuesday wednesday thursday friday saturday sunday today tomorrow",
    "thing": "apples bread milk eggs cheese tomatoes coffee rice sugar paper",
    "person": "anna david maria peter susan michael laura thomas",
    "music": "jazz rock classical piano quiet dance",
    "move": "left right forward back up down",
    "on": "on off",
}
ACCENTS = ("en-us", "en", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc")
OTHER_ACCENTS = ("en-gb-scotland", "en-029")  # held out
OTHER_VARIANTS = (  # held out
    "f3", "m4", "m7", "Annie", "Michael", "adam", "linda", "steph2", "edward", "belinda", "Denis", "quincy",
)  # fmt: skip
SPEEDS, SLOW, FAST = (125, 195), (95, 115), (205, 235)  # words a minute; the last two are held out
LONGEST = 5.2  # seconds


def sentence(random: Random, *, measuring: bool = False) -> str:
    """Return a sentence that is said in training, or one that is not."""
    while True:
        form = random.choice(FORMS)
        for name, words in LISTS.items():
            while "{" + name + "}" in form:
                form = form.replace("{" + name + "}", random.choice(words.split()), 1)
        if held_out("sentence", form) == measuring:
            return form


def words() -> list[str]:
    """Return all words, sorted."""
    plain = " ".join(FORMS)
    for name in LISTS:
        plain = plain.replace("{" + name + "}", " ")
    return sorted({*plain.split(), *" ".join(LISTS.values()).split()})


@dataclass(frozen=True)
class SpokenSentence:
    """samples_N: int16 at RATE, silence around them removed."""

    text: str
    samples_N: np.ndarray


class Espeak:
    """eSpeak NG's library, in this process.

    home: a folder with libespeak-ng.so.1 and espeak-ng-data, as the package espeakng-loader has it.
    """

    def __init__(self, home: Path) -> None:
        self._library = ctypes.CDLL(str(home / "libespeak-ng.so.1"))
        data = home / "espeak-ng-data"
        if self._library.espeak_Initialize(2, 0, str(data).encode(), 0) != RATE:
            raise OSError(f"{data} is no data of eSpeak NG's version 1.52.")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._heard = list[np.ndarray]()
        self._take = kind(self._taken)  # kept alive as long as the library may call it
        self._library.espeak_SetSynthCallback(self._take)
        self.variants = tuple(sorted(each.name for each in (data / "voices/!v").iterdir()))

    def _taken(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _events: object) -> int:
        if count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, rate: int, pitch: int = 50, range_: int = 50) -> np.ndarray:
        """Return int16 samples, or none for a voice that there is not."""
        self._heard.clear()
        if self._library.espeak_SetVoiceByName(voice.encode()):
            return np.zeros(0, np.int16)
        for parameter, value in ((1, rate), (3, pitch), (4, range_)):
            self._library.espeak_SetParameter(parameter, value, 0)
        given = text.encode()
        self._library.espeak_Synth(given, len(given) + 1, 0, 1, 0, 1, None, None)
        return trimmed(np.concatenate(self._heard)) if self._heard else np.zeros(0, np.int16)

    def speech(
        self, random: Random, *, new_voice: bool = False, new_speed: bool = False, new_text: bool = False
    ) -> SpokenSentence:
        """Return a sentence by a voice of training, or by one that is held out."""
        while True:
            text = sentence(random, measuring=new_text)
            if new_voice:
                variant = random.choice(OTHER_VARIANTS)
                accent = random.choice(OTHER_ACCENTS + ACCENTS[:2])
            else:
                variant = random.choice([each for each in self.variants if each not in OTHER_VARIANTS])
                accent = random.choice(ACCENTS)
            low, high = random.choice((SLOW, FAST)) if new_speed else SPEEDS
            samples = self.say(
                text, f"{accent}+{variant}", random.randint(low, high), random.randint(20, 80), random.randint(20, 80)
            )
            if RATE / 4 < len(samples) < LONGEST * RATE and np.abs(samples).max() > 1000:
                return SpokenSentence(text, samples)


def trimmed(samples_N: np.ndarray) -> np.ndarray:
    """Return the samples without the silence around them."""
    loud = np.flatnonzero(np.abs(samples_N.astype(np.int32)) > 150)
    return samples_N[loud[0] : loud[-1] + 1] if len(loud) else samples_N[:0]


def errors(said: str, true: str) -> tuple[int, int]:
    """Return (words inserted, left out or wrong; words that were spoken)."""
    ours, theirs = said.lower().split(), true.split()
    row = list(range(len(theirs) + 1))
    for n, word in enumerate(ours, 1):
        before, row[0] = row[0], n
        for m, other in enumerate(theirs, 1):
            before, row[m] = row[m], min(row[m] + 1, row[m - 1] + 1, before + (word != other))
    return row[-1], len(theirs)


def error_rate(said: Sequence[str], true: Sequence[str]) -> float:
    found = [errors(a, b) for a, b in zip(said, true, strict=True)]
    return sum(wrong for wrong, _ in found) / sum(count for _, count in found)
