"""Prompts of models that speak: a text and maybe a voice in, speech tokens out.

Such a model is a causal language model whose vocabulary holds speech tokens; a style (speech/styles.py) says how it is
asked and what its tokens mean. Nothing but speech tokens and the end of speech can be sampled.
"""

from __future__ import annotations

from dataclasses import replace

from speechrl.data.audio import load_audio
from speechrl.models.load import LoadedModel
from speechrl.models.prompts import Prepared, PromptBuilder
from speechrl.sections import Selection
from speechrl.speech.sound import to_sound
from speechrl.speech.styles import STYLES, CodeBook, Reader
from speechrl.types import Codes, Prompt, Rollout, Sound, Utterance

REFERENCE_HZ = 16000
SILENCE = Sound(bytes(2 * REFERENCE_HZ), REFERENCE_HZ)  # a second


def prompt_builder(loaded: LoadedModel, data: Selection, keep_features: bool = True) -> PromptBuilder:
    """The builder for a model: of speech with --data.speech_style, of text without."""
    if data.speech_style:
        return SpeechPromptBuilder(loaded, data.speech_style)
    return PromptBuilder(loaded, data.instruction, data.force_language, keep_features=keep_features)


def spoken_reference(utterance: Utterance) -> Rollout:
    """A recording of the text, the voice to speak with, or a second of silence: what is there, in this order.

    It tries a reward before anything was sampled. Raises AudioError when the recording can't be read.
    """
    source = utterance.audio or (utterance.speaker.audio if utterance.speaker is not None else None)
    sound = SILENCE if source is None else to_sound(load_audio(source, REFERENCE_HZ, utterance.where), REFERENCE_HZ)
    return Rollout((), (), "stop", 0, "", "", codes=utterance.codes, sound=sound)


class SpeechPromptBuilder(PromptBuilder):
    """Builds prompts and labels of speech for one model and one style."""

    def __init__(self, loaded: LoadedModel, style: str):
        """Raises ValueError for a model that hears, or whose vocabulary lacks the style's tokens."""
        if loaded.family.has_audio:
            raise ValueError(
                f"--data.speech_style {style}: {loaded.path} is a {loaded.family.name} model; a causal language model "
                "with speech tokens is needed"
            )
        super().__init__(loaded)
        self.style = STYLES[style]
        self.family = replace(self.family, name=f"{self.family.name} ({style})", prefill=None)
        self.book = CodeBook.of(self.style, self.tokenizer.get_vocab())
        self._reader = Reader(self.book)
        self._speech_ids = frozenset(self.book.allowed_ids)
        self.stop_ids = (self.book.end_id,)
        self.allowed_ids = self.book.allowed_ids
        rows = loaded.model.get_output_embeddings().weight.shape[0] if loaded.model is not None else 0
        self.banned_ids = tuple(sorted(set(range(max(rows, len(self.tokenizer)))) - set(self.allowed_ids)))

    def check_fit(self, utterance: Utterance) -> None:
        what, speaker = "", utterance.speaker
        if not utterance.text.strip():
            what = "no text to say"
        elif speaker is not None and speaker.codes and self.style.needs_speaker_text and not speaker.text:
            what = "`speaker_codes` without `speaker_text`, which a model of this style must be given"
        elif utterance.prompt:
            what = "a `prompt`, which a model that speaks has no place for"
        if what:
            raise ValueError(f"{utterance.where}: utterance {utterance.id} has {what}")

    def label_ids(self, utterance: Utterance, with_language: bool) -> tuple[int, ...]:
        if not utterance.codes:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} has no `codes` to learn from; make them from its audio "
                "with `speechrl encode-speech`"
            )
        return (*self._tokens(utterance, utterance.codes), self.book.end_id)

    def reference(self, utterance: Utterance) -> Rollout:
        return spoken_reference(utterance)

    def codes_of(self, token_ids: tuple[int, ...]) -> Codes | None:
        return self._reader.parse(token_ids).codes

    def decode(self, token_ids: tuple[int, ...], utterance: Utterance) -> tuple[str, str, str | None]:
        """(how many frames there are, or why there are none; no text; no language)."""
        parsed = self._reader.parse(token_ids)
        return f"[{parsed.fault or f'{len(parsed.codes)} frames'}]", "", None

    def _text_prompt(self, utterance: Utterance) -> Prepared:
        self.check_fit(utterance)
        spoken = self._tokens(utterance, utterance.speaker.codes) if utterance.speaker is not None else ()
        with self._lock:  # as the class above: threads of --data.num_workers are here side by side
            request = self.style.request(utterance, "".join(self.tokenizer.convert_ids_to_tokens(list(spoken))))
            text = self._templated(request.user, request.answer) if request.user else request.answer
            ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        found = tuple(token for token in ids if token in self._speech_ids)
        if found != spoken:
            raise ValueError(
                f"{utterance.where}: the prompt of {utterance.id} holds {len(found)} speech tokens for {len(spoken)} "
                "of its speaker; a text that contains speech tokens can't be said"
            )
        # what rewards and logs see is the text, without hundreds of speech tokens
        return Prepared(Prompt(utterance, ids, utterance.text), None)

    def _templated(self, user: str, answer: str) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(f"--data.speech_style {self.style.name}: the tokenizer has no chat template")
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)

    def _tokens(self, utterance: Utterance, codes: Codes) -> tuple[int, ...]:
        try:
            return self.book.tokens(codes)
        except ValueError as error:
            raise ValueError(
                f"{utterance.where}: the codes of {utterance.id} are not of this model's codec: {error}"
            ) from None
