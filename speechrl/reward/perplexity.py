"""Perplexity of hypotheses under a causal language model: fluency that no rule sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


class Perplexity:
    """Scores texts with a Hugging Face causal language model; make one when the reward file loads, not per call.

    folder: a local folder with model and tokenizer; nothing is downloaded. device: a torch device. batch_size: texts
    per forward. ValueError: no such folder, or a tokenizer without a token to start from.
    """

    def __init__(self, folder: str | Path, device: str = "cpu", batch_size: int = 32):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

        if not Path(folder).is_dir():
            raise ValueError(f"language model {folder}: no such folder")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
        self.folder, self.batch_size = folder, batch_size
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(device).eval()
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is None and eos is None:
            raise ValueError(f"language model {folder}: its tokenizer has neither a bos nor an eos token to start from")
        self._start_id: int = eos if bos is None else bos
        self._limit: int | None = getattr(self._model.config, "max_position_embeddings", None)

    def nats_per_token(self, texts: Sequence[str]) -> list[float | None]:
        """Mean negative log-likelihood of each text's tokens after the start token, in [0, inf) nats; low is fluent.

        None for an empty text. ValueError, with the index, for a text longer than the model's context.
        """
        ids = [self._tokenizer(_without_surrogates(text), add_special_tokens=False).input_ids for text in texts]
        for index, row in enumerate(ids):
            if self._limit is not None and len(row) >= self._limit:
                raise ValueError(
                    f"text {index} has {len(row)} tokens; with the start token, language model {self.folder} takes at "
                    f"most {self._limit}"
                )
        # By length, so that a batch holds little padding.
        order = sorted((index for index, row in enumerate(ids) if row), key=lambda index: len(ids[index]))
        nats: list[float | None] = [None] * len(texts)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, value in zip(batch, self._batch([ids[index] for index in batch]), strict=True):
                nats[index] = value
        return nats

    def perplexities(self, texts: Sequence[str]) -> list[float | None]:
        """exp of `nats_per_token`, in [1, inf)."""
        return [None if nats is None else math.exp(nats) for nats in self.nats_per_token(texts)]

    def _batch(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        longest = max(len(row) for row in rows)
        # Padding is on the right and causal attention never looks there; the mask keeps it out of the mean too.
        padded = [[self._start_id, *row, *[self._start_id] * (longest - len(row))] for row in rows]
        ids_BT = torch.tensor(padded, device=self._model.device)
        real_BT = torch.tensor([[1] * (len(row) + 1) + [0] * (longest - len(row)) for row in rows]).to(ids_BT)
        with torch.inference_mode():
            logits_BTV = self._model(input_ids=ids_BT, attention_mask=real_BT).logits[:, :-1].float()
        nats_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
        scored_BT = real_BT[:, 1:]
        return ((nats_BT * scored_BT).sum(1) / scored_BT.sum(1)).tolist()


def _without_surrogates(text: str) -> str:
    """Half of a surrogate pair, which tokenizers refuse, becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
