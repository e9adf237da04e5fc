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
    "turn {on} the {device} in the {room}", "turn {on} the {color} {device}", "please turn {on} the {device} now",
    "set the {room} {device} to {color}", "set an alarm for {hour} {minute}", "wake me at {hour} {minute} on {day}",
    "what is the weather in {city} {day}", "is it going to rain in {city} on {day}", "book a train to {city} on {day}",
    "call {person}", "call {person} at {hour} {minute}", "send a message to {person}", "play some {music} music",
    "play {music} music in the {room}", "add {thing} to my list", "add {thing} and {thing} to the shopping list",
    "move {digit} steps {move}", "the code is {digit} {digit} {digit} {digit}", "open the door of the {room}",
    "{digit} {digit} {digit} {digit} {digit}", "do we have {thing} at home", "remind {person} to buy {thing}",
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
QUIET = 150  # samples up to here are silence
LAST_EVENT, WORD_EVENT = 0, 1  # of speak_lib.h


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
    """samples_N: int16 at RATE, silence around them removed. begins: the sample and the number of each word that eSpeak
    NG began; it joins some with the one before."""

    text: str
    samples_N: np.ndarray
    begins: tuple[tuple[int, int], ...] = ()


class EspeakEvent(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int), ("unique_identifier", ctypes.c_uint), ("text_position", ctypes.c_int),
        ("length", ctypes.c_int), ("audio_position", ctypes.c_int), ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p), ("id", ctypes.c_char * 8),
    )  # fmt: skip


class Espeak:
    """eSpeak NG's library, in this process.

    home: a folder with libespeak-ng.so.1 and espeak-ng-data, as the package espeakng-loader has it.
    """

    def __init__(self, home: Path) -> None:
        self._library = ctypes.CDLL(str(home / "libespeak-ng.so.1"))
        data = home / "espeak-ng-data"
        if self._library.espeak_Initialize(2, 0, str(data).encode(), 0) != RATE:
            raise OSError(f"{data} is no data of eSpeak NG's version 1.52.")
        samples, events = ctypes.POINTER(ctypes.c_short), ctypes.POINTER(EspeakEvent)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, samples, ctypes.c_int, events)
        self._heard, self._begun = list[np.ndarray](), list[tuple[int, int]]()
        self._take = kind(self._taken)  # kept alive as long as the library may call it
        self._library.espeak_SetSynthCallback(self._take)
        self.variants = tuple(sorted(each.name for each in (data / "voices/!v").iterdir()))

    def _taken(self, samples: ctypes._Pointer[ctypes.c_short], count: int, events: ctypes._Pointer[EspeakEvent]) -> int:
        if count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        number = 0
        while events[number].type != LAST_EVENT:
            if events[number].type == WORD_EVENT:
                self._begun.append((events[number].sample, events[number].text_position - 1))
            number += 1
        return 0

    def say(self, text: str, voice: str, rate: int, pitch: int = 50, range_: int = 50) -> SpokenSentence:
        """Return a text as it is said, without samples for a voice that there is not."""
        self._heard.clear()
        self._begun.clear()
        if self._library.espeak_SetVoiceByName(voice.encode()):
            return SpokenSentence(text, np.zeros(0, np.int16))
        for parameter, value in ((1, rate), (3, pitch), (4, range_)):
            self._library.espeak_SetParameter(parameter, value, 0)
        given = text.encode()
        self._library.espeak_Synth(given, len(given) + 1, 0, 1, 0, 1, None, None)
        samples = np.concatenate([*self._heard, np.zeros(0, np.int16)])
        loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > QUIET)
        first, last = (loud[0], loud[-1] + 1) if len(loud) else (0, 0)
        begins = ((max(at - int(first), 0), text[:place].count(" ")) for at, place in self._begun)
        return SpokenSentence(text, samples[first:last], tuple(begins))

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
            found = self.say(
                text, f"{accent}+{variant}", random.randint(low, high), random.randint(20, 80), random.randint(20, 80)
            )
            if RATE / 4 < len(found.samples_N) < LONGEST * RATE and np.abs(found.samples_N).max() > 1000:
                return found


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
