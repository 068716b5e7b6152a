"""LoRA: killed and resumed, it makes the same steps; and peft reads what was stored."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from ckptcore import InvalidState, export_checkpoint, open_checkpoint  # noqa: E402
from ckptcore.integrations.peft import Adapters  # noqa: E402


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("mode", ["one", "ddp", "fsdp2"])
def test_processes_that_were_killed_go_on_and_peft_reads_them(
    tmp_path: Path, processes: Any, mode: str
) -> None:
    number = 1 if mode == "one" else 2
    run = partial(processes, "peft_ranks.py", "peft_loop", number, mode=mode)
    expected = run(root=str(tmp_path / "whole"), seed=1)
    killed = run(root=str(tmp_path / "run"), seed=1, kill_at=7)
    assert killed == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=2)
    for before, after in zip(expected, resumed, strict=True):
        losses = {step: x for step, x in before["losses"].items() if int(step) > 5}
        assert after == {**before, "losses": losses, "world": number}
    folder = tmp_path / "run" / "checkpoint-10"
    stored = open_checkpoint(folder).manifest.components
    assert set(stored) == {"adapter_model", "optimizer", "rng"}
    if mode == "fsdp2":
        assert stored["adapter_model"].pattern == "SHARDED"
        exported = tmp_path / "exported"
        export_checkpoint(folder, exported, component="adapter_model")
        (exported / "model.safetensors").rename(exported / "adapter_model.safetensors")
        folder = exported
    read = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)
    bits = b"".join(p.detach().numpy().tobytes() for p in read.parameters())
    assert sha256(bits).hexdigest() == resumed[0]["weights"]


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(InvalidState, match="must be a PeftModel, not a Linear"):
        Adapters(torch.nn.Linear(2, 2))
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(InvalidState, match="no adapter 'other'; it has default"):
        Adapters(model, "other")
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(InvalidState, match="trains 1,088 items, and adapter 'default' has 64"):
        Adapters(model)
