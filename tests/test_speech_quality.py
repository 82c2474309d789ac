"""Measures of generated speech on signals whose answers are known, and on espeak-ng's voices."""

from __future__ import annotations

import numpy as np
import pytest

from speechrl.data.audio import AudioError
from speechrl.data.synth import Espeak
from speechrl.reward.pinyin import pinyin_error_rate, syllables
from speechrl.reward.speaker import load_similarity, similarities
from speechrl.reward.speech_quality import (
    clipped_share,
    liveliness,
    looped_share,
    pitch_hz,
    pitch_spread_semitones,
    silence_share,
    voice_similarity,
)
from speechrl.speech.sound import active_rms, samples_of, sound_of_wav, to_sound, wav_bytes, write_sound
from speechrl.speech.vq import VqCodec, log_mel, train_vq
from speechrl.types import Sound

RATE = 16000
TIME_S = np.arange(2 * RATE) / RATE
WOMAN, MAN = "en-us+f2", "en-us+m3"


def buzz(hz: np.ndarray | float, level: float = 0.3) -> np.ndarray:
    """A tone with overtones whose pitch may move."""
    phase = 2 * np.pi * np.cumsum(np.broadcast_to(hz, TIME_S.shape)) / RATE
    return level * sum(np.sin(k * phase) / k for k in range(1, 8))


def spoken(text: str, voice: str = WOMAN) -> Sound:
    return to_sound(Espeak().synthesise(text, voice, 170, 50), RATE, -23.0)


# --- sound ----------------------------------------------------------------------------------------------------------


def test_a_sound_is_the_same_in_memory_and_in_a_file():
    sound = to_sound(buzz(200.0), RATE)
    assert sound_of_wav(wav_bytes(sound)) == sound
    assert (sound.num_samples, sound.duration_s) == (32000, 2.0)
    assert np.abs(samples_of(sound) - np.clip(buzz(200.0), -1, 1)).max() < 2 / 32767


def test_level_is_that_of_the_speech_and_not_of_its_pauses():
    tone = buzz(200.0, 0.05)
    for quiet in (tone, np.concatenate([tone, np.zeros(5 * RATE)])):
        sound = to_sound(quiet, RATE, -23.0)
        assert active_rms(samples_of(sound), RATE) == pytest.approx(10 ** (-23 / 20), rel=0.01)


def test_a_peak_is_not_clipped_by_the_level():
    peaky = np.zeros(RATE)
    peaky[::1000] = 0.5
    assert np.abs(samples_of(to_sound(peaky, RATE, -6.0))).max() == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("samples", [np.zeros(0), np.zeros((2, 3)), np.array([0.0, np.nan])])
def test_what_is_no_sound_is_refused(samples: np.ndarray):
    with pytest.raises(AudioError):
        to_sound(samples, RATE)


# --- measures -------------------------------------------------------------------------------------------------------


def test_silence_share_is_the_share_of_silence():
    half = np.concatenate([buzz(200.0), np.zeros(2 * RATE)])
    assert silence_share(to_sound(half, RATE)) == pytest.approx(0.5, abs=0.01)
    assert silence_share(Sound(bytes(2 * RATE), RATE)) == 1.0
    assert silence_share(to_sound(buzz(200.0), RATE)) == 0.0


def test_clipping_is_seen_whatever_the_level():
    tone = np.sin(2 * np.pi * 100 * TIME_S)
    assert clipped_share(to_sound(0.9 * tone, RATE)) == 0.0
    # |sin| > 0.5 in two thirds of the time
    for level in (1.0, 0.1):
        assert clipped_share(to_sound(level * np.clip(tone, -0.5, 0.5), RATE)) == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("hz", [80.0, 120.0, 220.0, 350.0])
def test_pitch_of_a_tone(hz: float):
    found = pitch_hz(to_sound(buzz(hz), RATE))
    assert np.median(found) == pytest.approx(hz, rel=0.01)


def test_pitch_spread_is_in_semitones():
    """F0 that sweeps over an octave evenly: uniform on 12 semitones, of which the inner four fifths are 9.6 wide."""
    swept = to_sound(buzz(100 * 2 ** (TIME_S / 2)), RATE)
    assert pitch_spread_semitones(swept) == pytest.approx(9.6 / np.sqrt(12), rel=0.05)
    flat = to_sound(buzz(150.0), RATE)
    assert pitch_spread_semitones(flat) == pytest.approx(0.0, abs=0.1)
    assert liveliness(flat) < 0.1 and liveliness(swept) == 1.0
    noise = np.random.default_rng(0).standard_normal(2 * RATE) * 0.1
    assert pitch_spread_semitones(to_sound(noise, RATE)) is None and liveliness(to_sound(noise, RATE)) == 0.0


def test_a_loop_is_heard_and_repeated_words_are_not():
    sentence = samples_of(spoken("turn on the kitchen light and open the window"))
    assert looped_share(to_sound(sentence, RATE)) == 0.0
    assert looped_share(to_sound(np.tile(sentence, 3), RATE)) > 0.5
    assert looped_share(spoken("eight eight eight")) == 0.0


def test_a_voice_is_likest_itself():
    texts = ("check one two", "open the kitchen window")
    woman, man = ([spoken(text, voice) for text in texts] for voice in (WOMAN, MAN))
    assert voice_similarity(woman[0], woman[0]) == pytest.approx(1.0)
    assert min(voice_similarity(*woman), voice_similarity(*man)) > 0.9
    assert max(voice_similarity(woman[0], man[1]), voice_similarity(man[0], woman[1])) < 0.7
    assert voice_similarity(woman[0], Sound(bytes(RATE), RATE)) == 0.0


def test_similarities_abstain_without_a_voice_and_are_0_without_a_sound(tmp_path):
    write_sound(tmp_path / "v.wav", spoken("check one two"))
    path = str(tmp_path / "v.wav")
    found = similarities(load_similarity("statistics"), [spoken("stop"), None, spoken("stop")], [path, path, None])
    assert found[0] > 0.8 and found[1:] == [0.0, None]
    with pytest.raises(ValueError, match="there are statistics, resemblyzer"):
        load_similarity("ears")


def test_pinyin_makes_homophones_equal():
    assert syllables("中国，银行 iPhone") == ["zhong", "guo", "yin", "hang", *"iphone"]
    assert pinyin_error_rate("他在树上", "她再数上") == 0.0
    assert pinyin_error_rate("打开窗户", "打开门") == pytest.approx(2 / 3)
    assert pinyin_error_rate("", "打开") == 1.0 and pinyin_error_rate("", "") == 0.0


# --- the codec made in seconds --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec() -> VqCodec:
    texts = ["turn on the light", "open the door", "call five nine", "check the kitchen radio"]
    return train_vq([samples_of(spoken(text, voice)) for text in texts for voice in (WOMAN, MAN)], 128)


def test_the_codec_keeps_what_it_encodes(codec: VqCodec, tmp_path):
    clip = samples_of(spoken("turn on the radio"))
    codes = codec.encode(clip)
    assert len(codes) == -(-len(clip) // 640)  # 25 frames a second, a begun one counts
    decoded = codec.decode(codes)
    assert len(decoded) == 640 * len(codes)
    # mel frames of the decoded clip are nearer to the clip's than to those of another text in the same voice
    other = samples_of(spoken("call the office one two"))
    mine, its, wrong = (log_mel(x)[: len(log_mel(clip)) - 4] for x in (decoded, clip, other))
    frames = min(map(len, (mine, its, wrong)))

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.corrcoef(a[:frames].ravel(), b[:frames].ravel())[0, 1])

    assert correlation(mine, its) > 0.85 > correlation(mine, wrong)
    assert np.array_equal(decoded, codec.decode(codes))
    codec.save(tmp_path)
    assert VqCodec.load(tmp_path).encode(clip) == codes


def test_too_little_speech_for_a_codec():
    with pytest.raises(ValueError, match="are too few for 128 codes"):
        train_vq([np.zeros(RATE)], 128)
