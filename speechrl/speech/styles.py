"""How a causal language model writes speech: one row a style. Strings and numbers alone; a tokenizer makes ids of them.

A style says what a prompt looks like, which token stands for which code at which place of a frame, and what ends the
speech. What comes out of a model is `Codes`: a tuple of codes for every frame, in the order of its tokens. A codec
(codecs.py) knows what they sound like.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from speechrl.types import Codes, Utterance


@dataclass(frozen=True)
class Request:
    """A prompt in words. user: what the chat template wraps as a user's message; "" for a style that has no chat, whose
    `answer` is the whole prompt. answer: how the model's answer begins.
    """

    user: str
    answer: str


@dataclass(frozen=True)
class Style:
    """One row of the table.

    tokens_per_frame: K, places of a frame; 0: as many as the tokenizer has tokens for.
    token_name: (place, code) -> the token's name in the vocabulary.
    max_codes: codes of one place; a tokenizer may have fewer.
    request: (utterance, tokens of the speaker's codes as one string) -> the prompt, special tokens included.
    end: name of the token that ends the speech. needs_speaker_text: a speaker's codes only serve with their transcript.
    """

    name: str
    tokens_per_frame: int
    token_name: Callable[[int, int], str]
    max_codes: int
    request: Callable[[Utterance, str], Request]
    end: str
    needs_speaker_text: bool = True


@dataclass(frozen=True)
class Parsed:
    """What a completion means. codes: () unless every token is in its place and every frame whole; fault says why."""

    codes: Codes
    fault: str = ""


@dataclass(frozen=True)
class CodeBook:
    """token id <-> (place, code) for one tokenizer. id_of[place][code]; end_id ends the speech."""

    id_of: tuple[tuple[int, ...], ...]
    end_id: int

    @classmethod
    def of(cls, style: Style, vocabulary: Mapping[str, int]) -> CodeBook:
        """Reads the places' tokens out of a vocabulary. Raises ValueError naming the token that is missing."""
        width = style.tokens_per_frame or sum(1 for _ in _places(style, vocabulary))
        ids: list[tuple[int, ...]] = []
        for place in range(max(width, 1)):
            names = (style.token_name(place, code) for code in range(style.max_codes))
            found = []
            for name in names:
                if name not in vocabulary:
                    break
                found.append(vocabulary[name])
            ids.append(tuple(found))
        if not ids[0]:
            raise ValueError(f"--data.speech_style {style.name}: the tokenizer has no {style.token_name(0, 0)}")
        if len({len(row) for row in ids}) > 1:
            place = min(range(len(ids)), key=lambda index: len(ids[index]))
            missing = style.token_name(place, len(ids[place]))
            raise ValueError(f"--data.speech_style {style.name}: the tokenizer has no {missing}, but its other places")
        if style.end not in vocabulary:
            raise ValueError(f"--data.speech_style {style.name}: the tokenizer has no {style.end}, which ends speech")
        return cls(tuple(ids), vocabulary[style.end])

    @property
    def num_codes(self) -> int:
        """Codes of one place."""
        return len(self.id_of[0])

    @property
    def allowed_ids(self) -> tuple[int, ...]:
        """What may be sampled: every speech token and the end."""
        return (*(token for row in self.id_of for token in row), self.end_id)

    def tokens(self, codes: Codes) -> tuple[int, ...]:
        """Token ids of whole frames. Raises ValueError for a frame of another width, or a code without a token."""
        ids = []
        for index, frame in enumerate(codes):
            if len(frame) != len(self.id_of):
                raise ValueError(f"frame {index} has {len(frame)} codes, a frame of this style has {len(self.id_of)}")
            for place, code in enumerate(frame):
                if not 0 <= code < self.num_codes:
                    raise ValueError(f"frame {index} has the code {code}; the tokenizer has 0 to {self.num_codes - 1}")
                ids.append(self.id_of[place][code])
        return tuple(ids)


class Reader:
    """token ids -> codes, in time linear in the completion."""

    def __init__(self, book: CodeBook):
        self._code_of = [{token: code for code, token in enumerate(row)} for row in book.id_of]
        self._end_id = book.end_id

    def parse(self, token_ids: Sequence[int]) -> Parsed:
        """The codes of a completion, its end token (if it came so far) included or not. Never raises."""
        ids = list(token_ids)
        if ids and ids[-1] == self._end_id:
            ids.pop()
        if not ids:
            return Parsed((), "no speech tokens")
        width = len(self._code_of)
        flat = []
        for index, token in enumerate(ids):
            code = self._code_of[index % width].get(token)
            if code is None:
                elsewhere = any(token in row for row in self._code_of)
                return Parsed((), f"token {index} is {'of another place' if elsewhere else 'no speech token'}")
            flat.append(code)
        if len(flat) % width:
            return Parsed((), f"the last frame has {len(flat) % width} of {width} tokens")
        return Parsed(tuple(tuple(flat[start : start + width]) for start in range(0, len(flat), width)))


# --- the rows -------------------------------------------------------------------------------------------------------


def _places(style: Style, vocabulary: Mapping[str, int]) -> Iterator[int]:
    return itertools.takewhile(lambda place: style.token_name(place, 0) in vocabulary, itertools.count())


def _with_speaker_text(utterance: Utterance) -> str:
    """The speaker's transcript before the text: the model goes on where the recording ends."""
    said = utterance.speaker.text if utterance.speaker is not None else ""
    return f"{said} {utterance.text}" if said else utterance.text


def _llasa_request(utterance: Utterance, speaker_tokens: str) -> Request:
    """Llasa (Ye et al. 2025, arXiv 2502.04128)."""
    text = _with_speaker_text(utterance)
    return Request(
        user=f"Convert the text to speech:<|TEXT_UNDERSTANDING_START|>{text}<|TEXT_UNDERSTANDING_END|>",
        answer=f"<|SPEECH_GENERATION_START|>{speaker_tokens}",
    )


def _orpheus_name(place: int, code: int) -> str:
    return f"<custom_token_{10 + 4096 * place + code}>"


def _orpheus_request(utterance: Utterance, speaker_tokens: str) -> Request:
    """Start of human, text, end of text, end of human, start of AI, start of speech. A voice goes by its name."""
    voice = utterance.metadata.get("voice")
    text = f"{voice}: {utterance.text}" if voice else utterance.text
    head = f"<custom_token_3><|begin_of_text|>{text}<|eot_id|><custom_token_4><custom_token_5><custom_token_1>"
    return Request("", head + speaker_tokens)


def _cosyvoice2_request(utterance: Utterance, speaker_tokens: str) -> Request:
    """The Hugging Face form of CosyVoice 2's language model: text between sos and task_id, speech behind."""
    return Request("", f"<|sos|>{_with_speaker_text(utterance)}<|task_id|>{speaker_tokens}")


STYLES: dict[str, Style] = {
    # one code a frame; made for X-codec 2 (65536 codes, 50 frames a second)
    "llasa": Style("llasa", 1, lambda place, code: f"<|s_{code}|>", 65536, _llasa_request, "<|SPEECH_GENERATION_END|>"),
    # the same chat for codecs of several codebooks, one token each: DAC, Mimi, EnCodec
    "flat": Style(
        "flat", 0, lambda place, code: f"<|s{place}_{code}|>", 65536, _llasa_request, "<|SPEECH_GENERATION_END|>"
    ),
    # SNAC at 24 kHz, seven tokens for each 2048 samples
    "orpheus": Style("orpheus", 7, _orpheus_name, 4096, _orpheus_request, "<custom_token_2>", needs_speaker_text=False),
    # 25 frames a second, decoded by CosyVoice 2's flow matching and vocoder
    "cosyvoice2": Style("cosyvoice2", 1, lambda place, code: f"<|s_{code}|>", 6561, _cosyvoice2_request, "<|eos1|>"),
}

# --- SNAC's layers in Orpheus's frame -------------------------------------------------------------------------------

# of each place of a frame: (layer, which of the layer's 1, 2 or 4 codes of that frame)
SNAC_PLACES = ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (2, 2), (2, 3))


def snac_layers(codes: Codes) -> list[list[int]]:
    """[T], [2T] and [4T] codes of SNAC's three layers, coarse to fine, from T frames of seven."""
    layers: list[list[int]] = [[], [], []]
    order = sorted(range(len(SNAC_PLACES)), key=lambda place: SNAC_PLACES[place])
    for frame in codes:
        for place in order:
            layers[SNAC_PLACES[place][0]].append(frame[place])
    return layers


def snac_frames(layers: Sequence[Sequence[int]]) -> Codes:
    """The inverse of `snac_layers`."""
    per_frame = (1, 2, 4)
    return tuple(
        tuple(layers[layer][frame * per_frame[layer] + index] for layer, index in SNAC_PLACES)
        for frame in range(len(layers[0]))
    )
