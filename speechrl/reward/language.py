"""Is the hypothesis in the language of the reference? By script, and by an identifier over a few candidates."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from speechrl.data.languages import language_code
from speechrl.data.normalise import normalise, script_of, words


def script_shares(text: str) -> dict[str, float]:
    """Share of each Unicode script among the words of a text (a Han or kana character is a word), summing to 1.

    Words and not letters, so that "iPhone" in a Chinese sentence weighs as one word. Numbers have no script: {} when
    the text has no letters.
    """
    letters = (next((char for char in word if char.isalpha()), None) for word in words(text))
    scripts = Counter(script_of(letter) for letter in letters if letter is not None)
    return {script: count / scripts.total() for script, count in scripts.items()}


def language_consistency(hyp: str, ref: str) -> float | None:
    """How far the hypothesis is written in the scripts of the reference, in [0, 1]: the overlap of `script_shares`.

    1 is the same mixture, so code-switching as in the reference is right and translating it is not. None (abstains)
    when the reference has no letters, whatever the hypothesis, so a whole group abstains or none of it. A hypothesis
    without letters (an empty one too) scores 0 against a reference with letters. Short texts need no threshold, since
    the script of one letter is certain; the price is that languages which share a script (English, French) can't be
    told apart and score 1: `language_match` tells them apart.
    """
    wanted, got = script_shares(ref), script_shares(hyp)
    if not wanted:
        return None
    # min: the shares of three scripts may sum to a little more than 1
    return min(sum(min(share, got.get(script, 0.0)) for script, share in wanted.items()), 1.0)


def identify(text: str, candidates: Collection[str]) -> dict[str, float]:
    """Probability of each candidate language for a text, by py3langid (Naive Bayes over bytes; works offline).

    candidates: two or more languages, as `language_code` takes them. The answer is keyed by code and sums to 1. Text
    without anything to go by, such as "" or "ok", gives all candidates the same. Loading takes a second, once per set
    of candidates. ValueError for fewer than two candidates, and for one that the identifier does not know.
    """
    return dict(_ranked(normalise(text), frozenset(language_code(candidate) for candidate in candidates)))


@lru_cache(maxsize=4096)  # the G hypotheses of a group share their reference, and many are equal
def _ranked(text: str, codes: frozenset[str]) -> list[tuple[str, float]]:
    return _identifier(codes).rank(text)


@lru_cache(maxsize=8)
def _identifier(codes: frozenset[str]) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # a model of 4 MB, for those who want it

    if len(codes) < 2:
        raise ValueError(f"language candidates {sorted(codes)}: give two or more to choose from")
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = sorted(codes - set(identifier.labels))
    if unknown:
        raise ValueError(f"language candidates {unknown} are not known to py3langid; it has {identifier.labels}")
    identifier.set_languages(sorted(codes))
    return identifier


def language_match(
    hyp: str,
    ref: str,
    candidates: Collection[str],
    language: str | None = None,
    min_letters: int = 10,
    sure: float = 0.8,
) -> float | None:
    """`language_consistency`, but 0 if the identifier is sure of another candidate than the reference's; in [0, 1].

    language: of the reference, one of the candidates; None takes what the identifier finds in the reference.
    sure: probability from which the identifier is believed. Both sides need it, so a hypothesis is in the wrong
    language only where that is plain, and a hypothesis equal to the reference scores 1.

    None (abstains) for a reference of fewer than `min_letters` letters and marks (an empty one too), and for one whose
    own language the identifier is not sure of. That depends on the reference alone, so a whole group abstains or none
    of it. An empty hypothesis scores 0, and one too short to identify is judged by its script. ValueError for a
    `language` that is no candidate, a `sure` that is no probability, and as in `identify`.
    """
    if not 0 < sure <= 1:
        raise ValueError(f"sure is {sure}; it is a probability above 0")
    found = identify(ref, candidates)
    expected = max(found, key=found.__getitem__) if language is None else language_code(language)
    if expected not in found:
        raise ValueError(f"language {language!r} of the reference is none of the candidates {sorted(found)}; add it")
    if _num_letters(ref) < min_letters or found[expected] < sure:
        return None
    others = (share for code, share in identify(hyp, candidates).items() if code != expected)
    return 0.0 if max(others) >= sure else language_consistency(hyp, ref)


def _num_letters(text: str) -> int:
    return sum(unicodedata.category(char)[0] in "LM" for char in normalise(text))
