"""What readers of Hugging Face need beside the weights, for the `files` of a save."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ..arguments import shown
from ..errors import InvalidState
from ..state.modules import bare_module


def hf_files(model: nn.Module, *others: Any) -> dict[str, bytes]:
    """The files that `from_pretrained` needs beside the weights: config.json and
    generation_config.json of a model of transformers, or adapter_config.json of one of peft; and
    those of tokenizers and processors. Nothing is imported, and no weights are read.

    A checkpoint that was saved with files=hf_files(model, tokenizer), whose component "model"
    (peft: "adapter_model") is not sharded, is a folder that stock readers load.

    model: model of transformers or peft, also in a wrapper (DDP, FSDP, torch.compile).
    *others: tokenizers, processors: anything with `save_pretrained(folder)`.

    Raises InvalidState for an object that has no such files.
    """
    if not isinstance(model, nn.Module):
        raise InvalidState(f"model must be a torch module, not {shown(model)}")
    bare: Any = bare_module(model)
    with tempfile.TemporaryDirectory(prefix="ckptcore-") as folder:
        for part in [*_configs(bare), *others]:
            if not callable(getattr(part, "save_pretrained", None)) or isinstance(part, nn.Module):
                raise InvalidState(
                    f"hf_files takes a model and tokenizers or processors, not {shown(part)}"
                )
            part.save_pretrained(folder)
        found = sorted(Path(folder).iterdir())
        if folders := [each.name for each in found if each.is_dir()]:
            raise InvalidState(f"the folder {folders[0]!r} cannot be a file of a checkpoint")
        return {each.name: each.read_bytes() for each in found}


def _configs(model: Any) -> list[Any]:
    """The configs of a model as its own save_pretrained() writes them."""
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and adapters:
        active = getattr(model, "active_adapter", None)
        adapter = copy.copy(adapters.get(active) or next(iter(adapters.values())))
        adapter.inference_mode = True
        return [adapter]
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not callable(getattr(config, "save_pretrained", None)):
        raise InvalidState(
            f"{type(model).__qualname__} has no config of transformers or peft; give files as "
            "{'config.json': bytes or path}"
        )
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    dtype = getattr(model, "dtype", None)
    config.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    generation = getattr(model, "generation_config", None)
    return [config] if generation is None else [config, generation]
