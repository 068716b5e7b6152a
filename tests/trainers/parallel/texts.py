"""A tiny language model of transformers with a tokenizer, both without a download."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

WORDS = 256
END = "w255"
ENDS = {"bos_token_id": 255, "eos_token_id": 255, "loss_type": "ForCausalLM"}


def tokenizer() -> Any:
    """Of the words w0 to w255; the last one is the end."""
    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, bos_token=END, model_max_length=16
    )


def language_model() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=64, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.2, **ENDS
        )
    )


class Letters:
    """Turns text into its bytes: for models that transformers does not know."""

    bos_token_id = pad_token_id = None
    eos_token_id = 255

    def __call__(self, text: str, truncation: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return torch.tensor(ids, dtype=torch.uint8).numpy().tobytes().hex()


# Before ranks are forked: what transformers imports when a model is first used.
language_model().generate(torch.tensor([[1]]), max_new_tokens=1)  # type: ignore[operator]
