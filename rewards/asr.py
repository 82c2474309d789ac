"""Speech recognition: right characters, right keywords, right script, no loops.

Use it with --reward.remote_url rewards/asr.py, or copy it and change the weights.
"""

from speechrl.reward.compose import weighted_sum
from speechrl.reward.fluency import fluency
from speechrl.reward.keywords import keyword_f1
from speechrl.reward.language import language_consistency
from speechrl.reward.metrics import cer

# Relative. A part that doesn't apply to an utterance (no keyword list, a reference of digits) leaves the mean.
WEIGHTS = {"cer": 0.7, "keywords": 0.1, "language": 0.1, "fluency": 0.1}


def reward_func(queries, prompts, labels, *, responses, languages, keywords, **kwargs):
    raw_cers = [cer(hyp, ref, lang) for hyp, ref, lang in zip(responses, labels, languages, strict=True)]
    parts = {
        # Clipped: CER has no upper end, and one looping hypothesis would rule the spread of its group.
        "cer": [1.0 - min(raw, 1.0) for raw in raw_cers],
        "keywords": [keyword_f1(*row) for row in zip(responses, keywords, labels, languages, strict=True)],
        "language": [language_consistency(hyp, ref) for hyp, ref in zip(responses, labels, strict=True)],
        "fluency": [fluency(hyp) for hyp in responses],
    }
    logs = {"cer_unclipped": raw_cers}
    return {"rewards": weighted_sum(parts, WEIGHTS), "parts": parts, "weights": WEIGHTS, "extra_logs": logs}
