"""The Trainer of transformers on one rank or several, with DDP or FSDP2, and with LoRA."""

from __future__ import annotations

from typing import Any

import peft
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from two_ranks import die, digest, facts

from ckptcore import KeepLast
from ckptcore.integrations.transformers import EngineTrainer


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(6) + number) % 16
        return {"input_ids": words, "labels": words}


class Death(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.trainer.manager.wait()
            die()


class Sharded(EngineTrainer):
    """With FSDP2, which the Trainer itself offers on accelerators only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        for state in (PartialState(), self.accelerator.state):
            state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False
        )
        self.is_fsdp_enabled = True


def transformers_run(
    rank: int,
    world_size: int,
    mode: str,
    root: str,
    seed: int,
    kill_at: int = -1,
    best: bool = False,
    lora: bool = False,
) -> dict[str, Any]:
    """Ten steps, six an epoch, of a model with dropout; a save every fourth."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model: Any = GPT2LMHeadModel(config)
    if lora:
        torch.manual_seed(0)
        adapter = peft.LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.5
        )
        model = peft.get_peft_model(GPT2LMHeadModel(config), adapter)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed * parameter.requires_grad)
    more = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    args = TrainingArguments(
        output_dir=root,
        max_steps=10,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **(more if best else {}),
    )
    death = Death(kill_at)
    trainer = (Sharded if mode == "fsdp2" else EngineTrainer)(
        model=model,
        args=args,
        train_dataset=Samples(),
        eval_dataset=Samples(),
        callbacks=[death],
        checkpoints={"keep": KeepLast(3)},
    )
    death.trainer = trainer
    torch.rand(1 + rank + 2 * seed)  # the Trainer has given all ranks the same stream
    trainer.train(resume_from_checkpoint=True)
    names = {"loss", "eval_loss", "grad_norm", "learning_rate"}
    logged = [{k: e[k] for k in names & e.keys()} for e in trainer.state.log_history]
    optimizer = trainer.optimizer.optimizer
    found = {"resumed": trainer.resumed, "logged": logged, **facts(trainer.model, optimizer)}
    return {**found, "buffers": digest(trainer.model.buffers())}
