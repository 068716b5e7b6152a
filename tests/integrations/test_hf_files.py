"""Folders of checkpoints that stock readers of transformers and peft load, by what was given to the
save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import CheckpointManager, hf_files

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def same(a: Any, b: Any) -> bool:
    pairs = zip(a.items(), b.items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


def test_from_pretrained_reads_a_checkpoint(tmp_path: Path) -> None:
    model = llama()
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, {"model": model}, files=hf_files(torch.compile(model)))
        assert info.files == ["config.json", "generation_config.json"] and ckpt.verify(1) == []
    read = transformers.AutoModelForCausalLM.from_pretrained(info.url)
    assert type(read) is type(model) and read.dtype == torch.bfloat16
    assert same(read.state_dict(), model.state_dict())


def test_peft_reads_a_checkpoint_of_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter, 0.5)
    adapters = peft.get_peft_model_state_dict(model)
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, {"adapter_model": adapters}, files=hf_files(model))
        assert info.files == ["adapter_config.json"]
    read = peft.PeftModel.from_pretrained(llama(), info.url)
    assert same(peft.get_peft_model_state_dict(read), adapters)
    assert model.peft_config["default"].inference_mode is False
