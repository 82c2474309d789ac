"""What a model family is: the records that a row of the table (families.py) is made of, and what several rows share.

Shapes: B utterances, M numbers of one frame of encoder input, F frames, O encoder outputs of one utterance, D encoder
width, A rows that take the place of an utterance's placeholders in the prompt, H hidden width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from speechrl.data.languages import LANGUAGES, language_code
from speechrl.types import Utterance


@dataclass(frozen=True)
class Features:
    """Encoder input of one utterance: [M, F] padded as the encoder wants it, `num_frames` of them real."""

    mel_MF: Tensor
    num_frames: int


def _rows_are_outputs(num_outputs: int, extractor: Any) -> int:
    return num_outputs


def project_rows(projector: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor]:
    """[A, H] of each encoder output [A, D], where a projector maps every row for itself."""
    return list(projector(torch.cat(list(outputs))).split([len(item) for item in outputs]))


def project_stacked(projector: nn.Module, outputs: Sequence[Tensor], factor: int = 4) -> list[Tensor]:
    """[O / factor, H] of each encoder output [O, D], where the projector takes `factor` neighbours as one row."""
    return project_rows(projector, [item.reshape(len(item) // factor, -1) for item in outputs])


@dataclass(frozen=True)
class Hearing:
    """How a family hears.

    features: (feature extractor, samples) -> encoder input of one utterance, as the family's own processor makes it.
    num_outputs: real frames -> O. encode: (encoder, features) -> [O, D] of each, whatever the batch.
    num_rows: (O, feature extractor) -> A. project: (projector, [O, D] of each) -> [A, H] of each.
    max_s: processor -> seconds of audio that it takes; what is longer it would cut, or the model was not made for it.
    """

    features: Callable[[Any, np.ndarray], Features]
    num_outputs: Callable[[int], int]
    encode: Callable[[nn.Module, Sequence[Features]], list[Tensor]]
    num_rows: Callable[[int, Any], int] = _rows_are_outputs
    project: Callable[[nn.Module, Sequence[Tensor]], list[Tensor]] = project_rows
    max_s: Callable[[Any], float] = lambda processor: float("inf")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint folder differs from what transformers reads and writes by itself.

    names: prefix of weights in the model -> prefix in the folder. Empty: transformers' save_pretrained gets it right.
    renames: pattern in the folder -> replacement, for names that transformers does not read by itself.
    read_config: the config in the folder -> that of the model class. write_config: back, as the values of config.json.
    adapt: (model, path) -> None: changes a model just loaded, as where its projector lies inside the encoder.
    load_processor, save_processor: (path, **options of from_pretrained), (processor, folder), where AutoProcessor and
    save_pretrained do not do.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    read_config: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None
    write_config: Callable[[PreTrainedConfig], dict[str, Any]] | None = None
    adapt: Callable[[nn.Module, str], None] | None = None
    load_processor: Callable[..., Any] | None = None
    save_processor: Callable[[Any, Path], None] | None = None


@dataclass(frozen=True)
class Family:
    """One row of the table.

    model_class: name of the class in transformers that loads and builds the whole model.
    roles: role -> dotted names of its modules inside the model; "unused" are parts that a folder has and we don't run.
    messages: (utterance, instruction, language to force or None) -> chat messages, audio as {"type": "audio"}.
    prompt_ids: instead of messages, where there is no chat template: (processor, utterance, instruction, language) ->
    token ids with one run of audio placeholders.
    prefill: language name -> text that starts the answer when the language is forced.
    language_in_prompt: a forced language is said by messages or prompt_ids.
    answer: (utterance, with_language) -> the text that SFT trains, without the stop token.
    parse: completion -> (language or None, transcript).
    default_instruction: text beside the audio where nobody gave one and the processor has none.
    text_config: config of the model -> that of its language model alone, where get_text_config() is of no class of
    its own.
    output_tokens: special-looking tokens that a completion may hold.
    """

    name: str
    model_class: str
    roles: Mapping[str, tuple[str, ...]]
    answer: Callable[[Utterance, bool], str]
    parse: Callable[[str], tuple[str | None, str]]
    hearing: Hearing | None = None
    messages: Callable[[Utterance, str, str | None], list[dict]] | None = None
    prompt_ids: Callable[[Any, Utterance, str, str | None], list[int]] | None = None
    prefill: Callable[[str], str] | None = None
    language_in_prompt: bool = False
    default_instruction: str = ""
    text_config: Callable[[PreTrainedConfig], PreTrainedConfig] | None = None
    layout: Layout = Layout()
    output_tokens: tuple[str, ...] = ()

    @property
    def has_audio(self) -> bool:
        return self.hearing is not None

    @property
    def takes_language(self) -> bool:
        """Whether its prompt or the start of its answer can name the language."""
        return self.language_in_prompt or self.prefill is not None


AUDIO_ROLES = {
    "encoder": ("model.audio_tower",),
    "projector": ("model.multi_modal_projector",),
    "language_model": ("model.language_model", "lm_head"),
}

# of Qwen2-Audio and its heirs as published: transformers 5.19 reads them, but writes language_model.model.model.*
PUBLISHED_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def language_name(language: str | None) -> str | None:
    """The English name of a language however a manifest names it: "zh-CN" -> "Chinese", "eng" -> "English". One that
    we have no row for stays as it is.
    """
    return LANGUAGES.get(language_code(language), language) if language else None


def feature_extractor(processor: Any) -> Any:
    """The part of a processor that makes encoder input of samples; None if it has none."""
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)


def plain_answer(utterance: Utterance, with_language: bool) -> str:
    return utterance.text


def plain_parse(completion: str) -> tuple[str | None, str]:
    return None, completion.strip()


def audio_then_text(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    """One user turn: the audio, then the utterance's own prompt or the instruction."""
    content = [{"type": "audio"}, {"type": "text", "text": utterance.prompt or instruction}]
    return [{"role": "user", "content": content}]


def text_then_audio(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    """One user turn: the utterance's own prompt or the instruction, then the audio."""
    content = [{"type": "text", "text": utterance.prompt or instruction}, {"type": "audio"}]
    return [{"role": "user", "content": content}]


def whisper_features(extractor: Any, samples: np.ndarray) -> Features:
    """Log-mel of the extractor's whole window, a mask telling what is real. Longer audio would be cut: see max_s.

    Frames of the silence behind a clip are all alike: a few are computed, the others are copies.
    """
    hop, window = extractor.hop_length, extractor.n_samples
    num_frames = -(-len(samples) // hop)
    size = hop * (num_frames + extractor.n_fft // hop + 2)  # the last frame hears silence alone
    options = {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt"}
    if size >= window or extractor.dither:
        made = extractor(samples, padding="max_length", return_attention_mask=True, **options)
        return Features(made["input_features"][0], int(made["attention_mask"].sum()))
    padded = np.pad(samples, (0, size - len(samples)))
    mel_MF = extractor(padded, padding=False, truncation=False, **options)["input_features"][0]
    silence_M1 = mel_MF[:, -1:]
    return Features(torch.cat([mel_MF, silence_M1.expand(-1, window // hop - mel_MF.shape[1])], dim=1), num_frames)


def window_s(processor: Any) -> float:
    """Seconds that a Whisper-like feature extractor takes; it cuts off the rest."""
    extractor = feature_extractor(processor)
    return extractor.n_samples / extractor.sampling_rate


def halved_twice(num_frames: int) -> int:
    """A stride-2 convolution, then average pooling by two."""
    return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


def padded_batch(features: Sequence[Features], like: Tensor) -> tuple[Tensor, Tensor]:
    """(input [B, M, F], mask [B, F]: 1 where it is real) in the dtype and on the device of `like`."""
    width = max(item.mel_MF.shape[1] for item in features)
    mel_BMF = torch.zeros(len(features), features[0].mel_MF.shape[0], width, dtype=like.dtype, device=like.device)
    mask_BF = torch.zeros(len(features), width, dtype=torch.long, device=like.device)
    for row, item in enumerate(features):
        mel_BMF[row, :, : item.num_frames] = item.mel_MF[:, : item.num_frames].to(mel_BMF)
        mask_BF[row, : item.num_frames] = 1
    return mel_BMF, mask_BF
