"""Speech synthesis: the right words, in the right voice, at a plausible pace, with some melody and a clean signal.

Use it with --reward.remote_url rewards/tts.py and --algo.advantage.estimator gdpo, which normalises each part inside
its group: parts differ in spread, and intelligibility alone would flatten the melody. Options come as environment
variables, of this process or of `speechrl serve-reward`:

    SPEECHRL_TTS_ASR      recogniser: an export of speechrl, a Whisper folder, a CTranslate2 folder, or a server's URL
    SPEECHRL_TTS_SPEAKER  a row of reward/speaker.py: statistics (no model; the default) or resemblyzer
    SPEECHRL_TTS_MOS      a row of reward/naturalness.py: dnsmos; off if empty
    SPEECHRL_TTS_DEVICE   where a recogniser runs: cpu (the default) or cuda
"""

import math
import os

from speechrl.data.languages import language_code
from speechrl.reward.compose import weighted_sum
from speechrl.reward.lengths import speaking_rate
from speechrl.reward.metrics import cer
from speechrl.reward.naturalness import load_predictor, naturalness
from speechrl.reward.pinyin import pinyin_error_rate
from speechrl.reward.recogniser import hear_all, load_recogniser
from speechrl.reward.speaker import load_similarity, similarities
from speechrl.reward.speech_quality import clipped_share, liveliness, looped_share, silence_share

# Relative. `speaker` leaves the mean where a line names no voice, `likelihood` where the recogniser tells none.
WEIGHTS = {"words": 0.45, "likelihood": 0.1, "speaker": 0.15, "duration": 0.15, "signal": 0.1, "melody": 0.05}
WEIGHTS |= {"spoken": 0.0}  # for the logs: whether there is speech at all
MOS = os.environ.get("SPEECHRL_TTS_MOS", "")
if MOS:
    WEIGHTS |= {"natural": 0.15}
MOST_SILENCE = 0.4  # share of a sound; pauses and ends of ordinary clips stay below
if not os.environ.get("SPEECHRL_TTS_ASR"):
    raise ValueError("SPEECHRL_TTS_ASR is not set: export the path of a recogniser that is to listen")

device = os.environ.get("SPEECHRL_TTS_DEVICE", "cpu")
recogniser = load_recogniser(os.environ["SPEECHRL_TTS_ASR"], device)
similarity = load_similarity(os.environ.get("SPEECHRL_TTS_SPEAKER", "statistics"))
predictor = load_predictor(MOS) if MOS else None


def reward_func(queries, prompts, labels, *, generated_audio, speaker_paths, languages, durations_s, **kwargs):
    heard = hear_all(recogniser, generated_audio, labels, languages)
    texts = [item.text for item in heard]
    errors = [error_rate(*row) for row in zip(texts, labels, languages, strict=True)]
    parts = {
        "words": [1.0 - min(error, 1.0) for error in errors],
        "likelihood": [None if item.logprob is None else math.exp(item.logprob) for item in heard],
        "speaker": similarities(similarity, generated_audio, speaker_paths),
        "duration": [duration(*row) for row in zip(generated_audio, labels, languages, durations_s, strict=True)],
        "signal": [0.0 if sound is None else signal(sound) for sound in generated_audio],
        "spoken": [float(sound is not None) for sound in generated_audio],
        "melody": [0.0 if sound is None else liveliness(sound) for sound in generated_audio],
    }
    if predictor is not None:
        parts["natural"] = naturalness(predictor, generated_audio)
    logs = {"error_rate_unclipped": errors}
    rewards = weighted_sum(parts, WEIGHTS)
    return {"rewards": rewards, "parts": parts, "weights": WEIGHTS, "extra_logs": logs, "heard": texts}


def error_rate(heard, text, language):
    """Of characters; of toneless syllables in Chinese, where a recogniser can't tell homophones apart."""
    chinese = language and language_code(language) in ("zh", "yue", "cmn")
    return pinyin_error_rate(heard, text, language) if chinese else cer(heard, text, language)


def duration(sound, text, language, reference_s):
    """The shorter over the longer of the two durations; without a recording, whether anybody speaks at such a rate."""
    if sound is None:
        return 0.0
    if reference_s is None:
        return speaking_rate(text, sound.duration_s, language)
    return min(sound.duration_s, reference_s) / max(sound.duration_s, reference_s)


def signal(sound):
    """1 without loops, flat tops and long silence; each takes its share."""
    silence = max(silence_share(sound) - MOST_SILENCE, 0.0) / (1.0 - MOST_SILENCE)
    return (1.0 - looped_share(sound)) * (1.0 - min(20.0 * clipped_share(sound), 1.0)) * (1.0 - silence)
