"""Speech recognition that keeps quiet: audio of noise or silence (`"text": ""`) among the speech.

Where nothing is said, only an empty transcript earns the full reward, and more text earns less. Where something is
said: the characters, without sentences that nobody said, loops, more text than the audio has time for, or an end that
was cut off. Mix in about a tenth of noise: too much of it teaches a model to say nothing.

Use it with --reward.remote_url rewards/asr_robust.py, or copy it and change the weights.
"""

from speechrl.reward.compose import weighted_sum
from speechrl.reward.fluency import fluency
from speechrl.reward.hallucination import grounded_share, silence_score
from speechrl.reward.lengths import complete_ending, speaking_rate
from speechrl.reward.metrics import cer

# Relative. Of silence only `cer` and `silence` apply; of speech all but `silence`.
WEIGHTS = {"cer": 0.6, "silence": 0.4, "grounded": 0.1, "fluency": 0.1, "rate": 0.1, "ending": 0.1}


def reward_func(queries, prompts, labels, *, responses, languages, durations_s, finish_reasons, **kwargs):
    rows = zip(responses, labels, languages, durations_s, finish_reasons, strict=True)
    scored = [score(*row) for row in rows]
    parts = {name: [sample[name] for sample in scored] for name in WEIGHTS}
    logs = {"cut_off": [float(reason == "length") for reason in finish_reasons]}
    return {"rewards": weighted_sum(parts, WEIGHTS), "parts": parts, "weights": WEIGHTS, "extra_logs": logs}


def score(hyp, ref, language, duration_s, finish_reason):
    """The parts of one sample, each in [0, 1], or None where it doesn't apply to the utterance."""
    silence = silence_score(hyp, ref, rules=language)  # None: something is said
    of_speech = {
        "grounded": grounded_share(hyp, ref, rules=language),
        "fluency": fluency(hyp),
        "rate": speaking_rate(hyp, duration_s, language),
        "ending": complete_ending(hyp, ref, finish_reason, language),
    }
    return {
        "cer": 1.0 - min(cer(hyp, ref, language), 1.0),
        "silence": silence,
        **(of_speech if silence is None else dict.fromkeys(of_speech)),
    }
