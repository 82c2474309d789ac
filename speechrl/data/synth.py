"""A small speech corpus from nothing: English and Mandarin phrases, spoken by espeak-ng, with noise of a known SNR.

Everything is a function of the seed. Texts are dealt to the splits, so that no text stands in two of them; voices of
training, noisy training, dev and test are different. espeak-ng comes with the package `espeakng-loader`.
"""

from __future__ import annotations

import _ctypes
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr

from speechrl.data.audio import write_wav
from speechrl.data.manifest import write_manifest

RATE_HZ = 16000
MIN_DURATION_S, MAX_DURATION_S = 0.5, 3.0
RECIPE = 3  # raise it when the same seed would give another corpus


# ---------------------------------------------------------------------------------------------------------- espeak-ng

_VARIANT_FOLDER = "voices/!v"
_OUTPUT_SYNCHRONOUS, _CHARS_UTF8, _POSITION_CHARACTER = 2, 1, 1
_SPEED, _PITCH = 1, 3  # espeak_PARAMETER
# A name that is a file under lang/ spares the library reading every voice that it has, 3 ms a clip.
_LANGUAGE_FILES = {"en": "gmw/en", "cmn": "sit/cmn"}
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Espeak:
    """espeak-ng as a pure function of (text, voice, speed, pitch).

    The library keeps state from clip to clip (the phase of the pitch's flutter, which also moves the end of a clip; two
    noise generators, one of them libc's rand, seeded from the clock), and espeak_Terminate resets none of it. So every
    clip loads the library afresh and seeds both generators.
    """

    _lock = threading.Lock()  # the library is one per process

    def __init__(self) -> None:
        """Raises ValueError when the package espeakng-loader is missing."""
        try:
            import espeakng_loader
        except ImportError as error:
            raise ValueError("synthetic speech needs espeak-ng: pip install espeakng-loader") from error
        self._library, self._data = espeakng_loader.get_library_path(), espeakng_loader.get_data_path()
        self._libc = ctypes.CDLL(None)

    def synthesise(self, text: str, voice: str, speed_wpm: int, pitch: int) -> np.ndarray:
        """float32 [N samples] in [-1, 1] at 16 kHz.

        voice: a language of espeak-ng ("en-us", "cmn"), optionally with a variant ("cmn+f3"). speed_wpm: words a
        minute, 80 to 450. pitch: 0 to 100. Raises ValueError for values outside, an unknown voice, or no sound.
        """
        if not (80 <= speed_wpm <= 450 and 0 <= pitch <= 100):
            raise ValueError(f"speed {speed_wpm} wpm (80 to 450) or pitch {pitch} (0 to 100) is out of range")
        _, plus, variant = voice.partition("+")
        if plus and not os.path.isfile(os.path.join(self._data, _VARIANT_FOLDER, variant)):
            raise ValueError(f"voice {voice!r}: no variant {variant!r} in {self._data}/{_VARIANT_FOLDER}")
        with self._lock:
            pcm, rate_hz = self._speak(text, voice, speed_wpm, pitch)
        if not pcm.any():
            raise ValueError(f"espeak-ng gives no sound for {text!r} in voice {voice!r}")
        return np.clip(soxr.resample(pcm.astype(np.float32) / 32768, rate_hz, RATE_HZ), -1.0, 1.0)

    def _speak(self, text: str, voice: str, speed_wpm: int, pitch: int) -> tuple[np.ndarray, int]:
        parts: list[np.ndarray] = []

        def keep(samples: ctypes.Array, count: int, _events: int) -> int:
            if count > 0:
                parts.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
            return 0

        callback = _CALLBACK(keep)
        lib = ctypes.CDLL(self._library)
        try:
            rate_hz = lib.espeak_Initialize(_OUTPUT_SYNCHRONOUS, 0, self._data.encode(), 0)
            if rate_hz <= 0:
                raise ValueError(f"espeak-ng can't start with the data in {self._data}")
            lib.espeak_ng_SetRandSeed(ctypes.c_long(1))
            self._libc.srand(1)
            lib.espeak_SetSynthCallback(callback)
            base, plus, variant = voice.partition("+")
            if lib.espeak_SetVoiceByName((_LANGUAGE_FILES.get(base, base) + plus + variant).encode()) != 0:
                raise ValueError(f"voice {voice!r}: espeak-ng has no such language")
            lib.espeak_SetParameter(_SPEED, speed_wpm, 0)
            lib.espeak_SetParameter(_PITCH, pitch, 0)
            raw = text.encode() + b"\0"
            size = ctypes.c_size_t(len(raw))
            if lib.espeak_Synth(raw, size, 0, _POSITION_CHARACTER, 0, _CHARS_UTF8, None, None) != 0:
                raise ValueError(f"espeak-ng can't speak {text!r} in voice {voice!r}")
            lib.espeak_Synchronize()
        finally:
            lib.espeak_Terminate()
            _ctypes.dlclose(lib._handle)
        return (np.concatenate(parts) if parts else np.zeros(0, np.int16)), rate_hz


# -------------------------------------------------------------------------------------------------------------- noise

# name -> amplitude over frequency (Hz), up to a factor
NOISES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "white": lambda hz: np.ones_like(hz),
    "pink": lambda hz: 1 / np.sqrt(np.maximum(hz, 50.0)),
    "speech": lambda hz: (1 + (hz / 500) ** 2) ** -0.75,  # long-term spectrum of speech: flat, then -9 dB an octave
}


def add_noise(speech: np.ndarray, snr_db: float, kind: str, rng: np.random.Generator) -> np.ndarray:
    """float32 [N]: `speech` with noise of one of NOISES, mean power of the speech over that of the noise `snr_db`.

    Raises ValueError for another kind. The result is not limited to [-1, 1].
    """
    if kind not in NOISES:
        raise ValueError(f"noise {kind!r}; it must be one of {sorted(NOISES)}")
    size = 1 << (len(speech) - 1).bit_length()  # a length with large prime factors is ten times slower
    spectrum = np.fft.rfft(rng.standard_normal(size))
    noise = np.fft.irfft(spectrum * NOISES[kind](np.fft.rfftfreq(size, 1 / RATE_HZ)), n=size)[: len(speech)]
    wanted = np.mean(np.square(speech, dtype=np.float64)) / 10 ** (snr_db / 10)
    return (speech + noise * np.sqrt(wanted / np.mean(noise**2))).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ phrases


@dataclass(frozen=True)
class Phrase:
    text: str
    keywords: tuple[str, ...]  # the words that matter: verb, place, object; none in a string of digits


@dataclass(frozen=True)
class Language:
    """How phrases of one language are made. `join` stands between words; `actions` are (verbs, objects they take)."""

    bases: tuple[str, ...]  # espeak-ng languages
    join: str
    digits: tuple[str, ...]
    num_digits: tuple[int, int]
    numbers: tuple[str, ...]  # 0 to 59, spoken
    call: str
    places: tuple[str, ...]
    actions: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    command: str  # of {verb}, {place}, {object}
    timer: str  # of {number}, {unit}
    timer_keyword: str
    units: tuple[str, ...]
    temperature: str  # of {place}, {number}
    temperature_keyword: str


def _english_numbers() -> tuple[str, ...]:
    ones = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    stems = ["thir", "four", "fif", "six", "seven", "eigh", "nine"]
    teens = ["ten", "eleven", "twelve", *(f"{stem}teen" for stem in stems)]
    tens = ["twenty", "thirty", "forty", "fifty"]
    return tuple(ones + teens + [f"{ten} {ones[unit]}" if unit else ten for ten in tens for unit in range(10)])


def _chinese_numbers() -> tuple[str, ...]:
    ones = "零一二三四五六七八九"
    tens = ["十"] + [f"{ones[ten]}十" for ten in range(2, 6)]
    return tuple(ones) + tuple(ten + (ones[unit] if unit else "") for ten in tens for unit in range(10))


LANGUAGES: dict[str, Language] = {
    "English": Language(
        bases=("en-us", "en"),
        join=" ",
        digits=_english_numbers()[:10],
        num_digits=(3, 4),
        numbers=_english_numbers(),
        call="call",
        places=("kitchen", "bedroom", "bathroom", "office", "garage", "hallway", "balcony", "basement"),
        actions=(
            (("turn on", "turn off", "check"), ("light", "heater", "radio", "fan", "camera", "television")),
            (("open", "close", "check"), ("door", "window", "curtain", "cabinet")),
        ),
        command="{verb} the {place} {object}",
        timer="set a timer for {number} {unit}",
        timer_keyword="timer",
        units=("minutes", "seconds"),
        temperature="set the {place} to {number} degrees",
        temperature_keyword="degrees",
    ),
    "Chinese": Language(
        bases=("cmn",),
        join="",
        digits=_chinese_numbers()[:10],
        num_digits=(3, 5),
        numbers=_chinese_numbers(),
        call="拨打",
        places=("厨房", "卧室", "浴室", "书房", "车库", "走廊", "阳台", "客厅"),
        actions=(
            (
                ("打开", "关闭", "检查"),
                ("电灯", "暖气", "音响", "风扇", "相机", "电视", "大门", "窗户", "窗帘", "柜子"),
            ),
        ),
        command="{verb}{place}{object}",
        timer="定时{number}{unit}",
        timer_keyword="定时",
        units=("分钟", "秒钟"),
        temperature="{place}温度调到{number}度",
        temperature_keyword="温度",
    ),
}
KIND_SHARES = {"digits": 0.45, "call": 0.14, "command": 0.35, "timer": 0.03, "temperature": 0.03}


def _commands(language: Language) -> Iterator[Phrase]:
    for verbs, objects in language.actions:
        for verb, place, thing in itertools.product(verbs, ("", *language.places), objects):
            text = language.command.format(verb=verb, place=place, object=thing).replace("  ", " ")
            keywords = tuple(word for word in (verb, place, thing) if word)
            yield Phrase(text, keywords)


def _timers(language: Language) -> Iterator[Phrase]:
    for number, unit in itertools.product(language.numbers[2:], language.units):
        yield Phrase(language.timer.format(number=number, unit=unit), (language.timer_keyword, unit))


def _temperatures(language: Language) -> Iterator[Phrase]:
    for place, number in itertools.product(language.places, language.numbers[16:31]):
        text = language.temperature.format(place=place, number=number)
        yield Phrase(text, (place, language.temperature_keyword))


# kind -> every phrase of it; the other kinds are strings of digits, too many to list
GRIDS: dict[str, Callable[[Language], Iterator[Phrase]]] = {
    "command": _commands,
    "timer": _timers,
    "temperature": _temperatures,
}


def _digit_phrase(language: Language, kind: str, rng: random.Random) -> Phrase:
    digits = language.join.join(rng.choices(language.digits, k=rng.randint(*language.num_digits)))
    return Phrase(digits, ()) if kind == "digits" else Phrase(language.call + language.join + digits, (language.call,))


def speech_vocabulary(languages: Sequence[str] = tuple(LANGUAGES)) -> str:
    """Every character that a phrase can contain, sorted. Raises ValueError for a language that is not in LANGUAGES."""
    characters: set[str] = set()
    for name in languages:
        language = _language(name)
        characters.update(language.join, *language.digits, language.call)
        characters.update(*(phrase.text for grid in GRIDS.values() for phrase in grid(language)))
    return "".join(sorted(characters))


def _language(name: str) -> Language:
    if name not in LANGUAGES:
        raise ValueError(f"language {name!r}; it must be one of {sorted(LANGUAGES)}")
    return LANGUAGES[name]


# ------------------------------------------------------------------------------------------------------------- corpus

_TRAIN_VOICES = (
    *("", "m1", "m2", "m3", "m5", "m6", "m7", "f1", "f2", "f3", "f5"),
    *("Andy", "linda", "Alex", "steph", "Michael"),
)
_NOISY_VOICES = ("m8", "Gene", "Annie", "Lee", "Mike", "edward", "belinda", "paul", "ed", "john")
_DEV_VOICES = ("Diogo", "aunty", "robert", "Alicia")
_TEST_VOICES = ("m4", "f4", "david", "boris")
_CLEAN_DB, _NOISY_DB = (20.0, 40.0), (8.0, 20.0)
_CLEAN_WPM, _NOISY_WPM = (150, 230), (150, 250)


@dataclass(frozen=True)
class Split:
    """How the clips of one split sound. `held_out`: for evaluation, so its texts should not repeat."""

    voices: tuple[str, ...]
    snr_db: tuple[float, float]
    speed_wpm: tuple[int, int]
    held_out: bool


SPLITS: dict[str, Split] = {
    "sft_train": Split(_TRAIN_VOICES, _CLEAN_DB, _CLEAN_WPM, held_out=False),
    "sft_dev": Split(_DEV_VOICES, _CLEAN_DB, _CLEAN_WPM, held_out=True),
    "rl_train_noisy": Split(_NOISY_VOICES, _NOISY_DB, _NOISY_WPM, held_out=False),
    "rl_train_clean": Split(_TRAIN_VOICES, _CLEAN_DB, _CLEAN_WPM, held_out=False),
    "dev_noisy": Split(_DEV_VOICES, _NOISY_DB, _NOISY_WPM, held_out=True),
    "dev_clean": Split(_DEV_VOICES, _CLEAN_DB, _CLEAN_WPM, held_out=True),
    "test_noisy": Split(_TEST_VOICES, _NOISY_DB, _NOISY_WPM, held_out=True),
    "test_clean": Split(_TEST_VOICES, _CLEAN_DB, _CLEAN_WPM, held_out=True),
}
DEFAULT_SIZES = {
    "sft_train": 6000,
    "sft_dev": 200,
    "rl_train_noisy": 1200,
    "rl_train_clean": 400,
    "dev_noisy": 200,
    "dev_clean": 200,
    "test_noisy": 400,
    "test_clean": 400,
}
HELD_OUT_SHARE = 0.55  # of a grid's phrases, at most: the others are for training
MAX_TRIES = 30
CLIPS_PER_JOB = 100
Job = tuple[Path, int, str, int, list[tuple[str, "Phrase"]]]  # folder, seed, split, first index, its texts


def synthesise_corpus(
    out_dir: str | Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    sizes: Mapping[str, int] | None = None,
    workers: int = 1,
) -> Path:
    """Write <out_dir>/<split>.jsonl and its clips (16 kHz, 16 bit, FLAC) for every split of SPLITS; returns out_dir.

    sizes: utterances per split, where not DEFAULT_SIZES; scale multiplies them all. Half of each split is English, half
    Mandarin. The same arguments give the same bytes in any process, whatever the number of workers (processes; above
    1, a script that calls this needs `if __name__ == "__main__"`). corpus.json is written last: a folder whose
    corpus.json has these arguments is left as it is. Raises ValueError for a folder with another corpus, an unknown
    split, or sizes for which there are too few different phrases.
    """
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be at least 0")
    out, counts = Path(out_dir), _counts(scale, sizes or {})
    parameters = {"recipe": RECIPE, "seed": seed, "sizes": counts}
    stamp = out / "corpus.json"
    if stamp.exists():
        found = json.loads(stamp.read_text(encoding="utf-8"))
        if found != parameters:
            raise ValueError(f"--out {out} holds another corpus: {found}, not {parameters}; choose another folder")
        print(f"{out}: the corpus is complete already, nothing to do", flush=True)
        return out
    Espeak()  # a missing package is said here, once, and not by a worker
    jobs = [
        (out, seed, name, start, texts[start : start + CLIPS_PER_JOB])
        for name, texts in plan_phrases(counts, seed).items()
        for start in range(0, len(texts), CLIPS_PER_JOB)
    ]
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in SPLITS}
    for job, done in zip(jobs, _run(jobs, workers), strict=True):
        rows[job[2]] += done
    for name in SPLITS:
        write_manifest(out / f"{name}.jsonl", rows[name])
    write_manifest(stamp, [parameters])
    print(f"{out}: {sum(counts.values())} utterances, seed {seed}", flush=True)
    return out


def plan_phrases(sizes: Mapping[str, int], seed: int) -> dict[str, list[tuple[str, Phrase]]]:
    """split -> (language, phrase) of each utterance, languages by turns. No text stands in two splits.

    Held-out splits repeat a text only where HELD_OUT_SHARE of its kind is used up; training repeats it in other voices.
    Raises ValueError when a kind of phrase has too few texts to go round.
    """
    by_language: dict[str, dict[str, list[Phrase]]] = {}
    for turn, name in enumerate(LANGUAGES):
        rng = random.Random(f"{RECIPE}:{seed}:{name}")
        wanted = {split: len(range(turn, size, len(LANGUAGES))) for split, size in sizes.items()}
        by_language[name] = _plan_language(LANGUAGES[name], wanted, rng)
    plan = {}
    for split, size in sizes.items():
        names = [list(LANGUAGES)[index % len(LANGUAGES)] for index in range(size)]
        plan[split] = [(name, by_language[name][split][index // len(LANGUAGES)]) for index, name in enumerate(names)]
    owners = {phrase.text: split for split, rows in plan.items() for _, phrase in rows}
    assert all(owners[phrase.text] == split for split, rows in plan.items() for _, phrase in rows)
    return plan


def _plan_language(language: Language, wanted: Mapping[str, int], rng: random.Random) -> dict[str, list[Phrase]]:
    kinds = {
        split: rng.choices(list(KIND_SHARES), weights=list(KIND_SHARES.values()), k=count)
        for split, count in wanted.items()
    }
    dealt = {
        kind: _deal(kind, list(grid(language)), {split: kinds[split].count(kind) for split in wanted}, rng)
        for kind, grid in GRIDS.items()
    }
    space = sum(len(language.digits) ** n for n in range(language.num_digits[0], language.num_digits[1] + 1))
    if sum(wanted.values()) > space / 2:
        raise ValueError(f"--scale: {sum(wanted.values())} utterances a language, there are {space} strings of digits")
    used: set[str] = set()
    plan: dict[str, list[Phrase]] = {}
    for split in wanted:
        sources = {kind: itertools.cycle(dealt[kind][split]) for kind in GRIDS}
        plan[split] = []
        for kind in kinds[split]:
            phrase = next(sources[kind]) if kind in GRIDS else _digit_phrase(language, kind, rng)
            while kind not in GRIDS and phrase.text in used:
                phrase = _digit_phrase(language, kind, rng)
            used.add(phrase.text)
            plan[split].append(phrase)
    return plan


def _deal(kind: str, phrases: list[Phrase], wanted: Mapping[str, int], rng: random.Random) -> dict[str, list[Phrase]]:
    """A share of the phrases for each split, none in two: held-out splits first, the rest in proportion."""
    rng.shuffle(phrases)
    rest, dealt = list(phrases), {}
    for held_out, share in ((True, HELD_OUT_SHARE), (False, 1.0)):
        group = {split: count for split, count in wanted.items() if SPLITS[split].held_out == held_out}
        available, total = int(len(rest) * share), sum(group.values())
        for split, count in group.items():
            quota = min(count, available * count // total) if count else 0
            if count and not quota:
                raise ValueError(
                    f"too few different {kind} phrases ({len(phrases)}) for {sum(wanted.values())} utterances in "
                    f"{len(wanted)} splits: {split} gets none; make the sizes more even (--scale, sizes)"
                )
            dealt[split], rest = rest[:quota], rest[quota:]
    return dealt


def _run(jobs: Sequence[Job], workers: int) -> Iterator[list[dict[str, object]]]:
    """The manifest rows of each job, in the order of the jobs."""
    if workers <= 1:
        yield from map(_write_clips, jobs)
        return
    # spawn: a forked child would share the locks of a parent that has threads
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_write_clips, jobs)


def _write_clips(job: Job) -> list[dict[str, object]]:
    out, seed, name, start, texts = job
    (out / "audio" / name).mkdir(parents=True, exist_ok=True)
    speaker, rows = Espeak(), []
    for index, (language, phrase) in enumerate(texts, start=start):
        rng = np.random.default_rng([seed, list(SPLITS).index(name), index])  # so that no clip depends on another
        row, samples = _clip(speaker, SPLITS[name], language, phrase, rng)
        audio = f"audio/{name}/{index:05d}.flac"
        write_wav(out / audio, samples, RATE_HZ)
        rows.append({"id": f"{name}-{index:05d}", "audio": audio, **row})
    return rows


def _clip(
    speaker: Espeak, split: Split, language: str, phrase: Phrase, rng: np.random.Generator
) -> tuple[dict[str, object], np.ndarray]:
    """(manifest row, samples [N]). Voice, speed and pitch are drawn until the clip's duration is within the bounds."""
    for _ in range(MAX_TRIES):
        variant = str(rng.choice(split.voices))
        voice = str(rng.choice(LANGUAGES[language].bases)) + (f"+{variant}" if variant else "")
        speed_wpm = int(rng.integers(split.speed_wpm[0], split.speed_wpm[1] + 1))
        pitch = int(rng.integers(30, 71))
        speech = speaker.synthesise(phrase.text, voice, speed_wpm, pitch)
        if MIN_DURATION_S <= len(speech) / RATE_HZ <= MAX_DURATION_S:
            break
    else:
        raise ValueError(f"{phrase.text!r} lasts less than {MIN_DURATION_S} s or more than {MAX_DURATION_S} s")
    snr_db = round(float(rng.uniform(*split.snr_db)), 2)
    noise = str(rng.choice(list(NOISES)))
    samples = add_noise(speech, snr_db, noise, rng)
    samples *= rng.uniform(0.3, 0.9) / np.abs(samples).max()
    row = {
        "text": phrase.text,
        "language": language,
        "keywords": list(phrase.keywords),
        "duration_s": len(samples) / RATE_HZ,
        "voice": voice,
        "speed_wpm": speed_wpm,
        "pitch": pitch,
        "snr_db": snr_db,
        "noise": noise,
    }
    return row, samples


def _counts(scale: float, sizes: Mapping[str, int]) -> dict[str, int]:
    unknown = sorted(set(sizes) - set(SPLITS))
    if unknown:
        raise ValueError(f"unknown splits {unknown}; they must be among {list(SPLITS)}")
    return {name: max(2, round(scale * {**DEFAULT_SIZES, **sizes}[name])) for name in SPLITS}
