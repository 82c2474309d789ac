"""Speech recognition with hotword lists: the manifest's `keywords` are the list given to the model, distractors too.

Three views of the same list: the character error rate as the base, F1 of the hotwords (so printing the list doesn't
pay), and the word errors on hotwords (B-WER), which also sees a hotword that is nearly right. Hotwords in a transcript
of the wrong language count for nothing.

Use it with --reward.remote_url rewards/asr_hotword.py, or copy it and change the weights.
"""

from speechrl.reward.compose import weighted_sum
from speechrl.reward.keywords import bias_counts, keyword_f1
from speechrl.reward.language import language_consistency
from speechrl.reward.metrics import cer

# Relative. Without a list the hotword parts leave the mean. `language` opens the gate and is there for the logs.
WEIGHTS = {"cer": 0.5, "hotwords": 0.3, "b_wer": 0.2, "language": 0.0}
LANGUAGE_AT_LEAST = 0.5


def reward_func(queries, prompts, labels, *, responses, languages, keywords, **kwargs):
    rows = list(zip(responses, keywords, labels, languages, strict=True))
    language = [language_consistency(hyp, ref) for hyp, _, ref, _ in rows]
    counts = [bias_counts(*row) for row in rows]
    accuracies = [1.0 - min(count.b_wer, 1.0) if row[1] else None for count, row in zip(counts, rows, strict=True)]
    parts = {
        "cer": [1.0 - min(cer(hyp, ref, lang), 1.0) for hyp, _, ref, lang in rows],
        "hotwords": gated([keyword_f1(*row) for row in rows], language),
        "b_wer": gated(accuracies, language),
        "language": language,
    }
    logs = {"b_wer_unclipped": [count.b_wer for count in counts]}
    return {"rewards": weighted_sum(parts, WEIGHTS), "parts": parts, "extra_logs": logs}


def gated(part, language):
    """0 where the language is wrong. A part that abstains still does, and a language that abstains lets it pass."""
    wrong = [share is not None and share < LANGUAGE_AT_LEAST for share in language]
    return [0.0 if value is not None and shut else value for value, shut in zip(part, wrong, strict=True)]
