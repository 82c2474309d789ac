"""Speech recognition with hotword lists: the manifest's `keywords` are the list given to the model, distractors too.

Three views of the same list: the character error rate as the base, F1 of the hotwords (so printing the list doesn't
pay), and the word errors on hotwords (B-WER), which also sees a hotword that is nearly right. Hotwords in a transcript
of the wrong language count for nothing.

Use it with --reward.remote_url rewards/asr_hotword.py, or copy it and change the weights.
"""

from speechrl.reward.compose import gate, one_minus, weighted_sum
from speechrl.reward.keywords import bias_counts, keyword_f1
from speechrl.reward.language import language_consistency
from speechrl.reward.metrics import cer

# Relative. Without a list the hotword parts leave the mean. `language` opens the gate and is there for the logs.
WEIGHTS = {"cer": 0.5, "hotwords": 0.3, "b_wer": 0.2, "language": 0.0}
LANGUAGE_AT_LEAST = 0.5


def reward_func(queries, prompts, labels, *, responses, languages, keywords, **kwargs):
    rows = list(zip(responses, keywords, labels, languages, strict=True))
    language = [language_consistency(hyp, ref) for hyp, _, ref, _ in rows]
    b_wers = [bias_counts(*row).b_wer if row[1] else None for row in rows]
    parts = {
        "cer": one_minus([cer(hyp, ref, lang) for hyp, _, ref, lang in rows]),
        "hotwords": gate([keyword_f1(*row) for row in rows], language, LANGUAGE_AT_LEAST),
        "b_wer": gate(one_minus(b_wers), language, LANGUAGE_AT_LEAST),
        "language": language,
    }
    logs = {"b_wer_unclipped": b_wers}
    return {"rewards": weighted_sum(parts, WEIGHTS), "parts": parts, "weights": WEIGHTS, "extra_logs": logs}
