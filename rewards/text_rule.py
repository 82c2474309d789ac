"""The text quickstart: "3 7 1 ->" is to be answered with the sorted digits "1 3 7", which are the label."""

from speechrl.reward.compose import weighted_sum
from speechrl.reward.metrics import wer

# `similarity` leads the way while few answers are right; `exact` keeps the last digit worth its while.
WEIGHTS = {"similarity": 0.8, "exact": 0.2}


def reward_func(queries, prompts, labels, *, responses, **kwargs):
    pairs = list(zip(responses, labels, strict=True))
    parts = {
        "similarity": [1.0 - min(wer(answer, label), 1.0) for answer, label in pairs],  # edits between digits
        "exact": [float(answer.split() == label.split()) for answer, label in pairs],
    }
    return {"rewards": weighted_sum(parts, WEIGHTS), "parts": parts, "weights": WEIGHTS}
