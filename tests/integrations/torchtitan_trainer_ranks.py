"""torchtitan's own Trainer on CPUs, around its checkpoint manager or ours.

Real: Trainer, a tiny Llama 3, FSDP2, loss, optimizers, schedulers, loader, metrics, and the manager. Not real, since torchtitan 0.3 wants an accelerator,
Triton and a later torch: what it asks of a device's memory, the kernels of its mixture of experts,
`datasets`, `torch.distributed.set_timeout`, and attention, which is torch's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend
from two_ranks import die, facts


class Absent(ModuleType):
    """A module that is imported, and not used."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def on_cpus() -> None:
    """Let torchtitan take the CPU for its device."""
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    for name in (kernels, "datasets", "datasets.distributed"):
        sys.modules[name] = Absent(name)
    device: Any = torch.cpu
    device.get_device_name = lambda _: "CPU"
    device.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 30)
    device.memory_stats = lambda _: {}
    device.reset_peak_memory_stats = device.empty_cache = lambda: None
    device.current_device = lambda: 0
    later: Any = dist
    later.set_timeout = lambda timeout, group: dist.distributed_c10d._set_pg_timeout(timeout, group)


on_cpus()
with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan import trainer as titan_trainers
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

from ckptcore.integrations.torchtitan import EngineCheckpointManager  # noqa: E402

# At its end the Trainer waits two seconds for other ranks.
titan_trainers.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
WORDS, LENGTH, STEPS = 64, 16, 6


class Words(torch.utils.data.IterableDataset[Any]):
    """A stream that knows its position."""

    def __init__(self, rank: int) -> None:
        self.position, self.rank = 0, rank

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            words = torch.arange(LENGTH + 1) * (self.position + 31 * self.rank) % WORDS
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(Words(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):  # type: ignore[misc]
    """The stream has numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = lambda *_, **__: None


def tiny(size: int, layers: int) -> Any:
    """As torchtitan's `debugmodel`, but smaller."""
    rope = ComplexRoPE.Config(dim=size // 2, max_seq_len=LENGTH, theta=10000.0)
    blocks = llama3._build_llama3_layers(
        n_layers=layers, dim=size, n_heads=2, hidden_dim=2 * size, rope=rope, attn_backend="flex"
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH]
    return llama3.Llama3Model.Config(
        dim=size,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS, embedding_dim=size, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=size, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=size, out_features=WORDS, param_init=llama3._output_linear_init(size)
        ),
        layers=blocks,
    )


def trainer(
    root: str,
    seed: int,
    ours: bool,
    *,
    size: int = 16,
    layers: int = 1,
    steps: int = STEPS,
    interval: int = 2,
    **settings: Any,
) -> Any:
    spec = llama3.model_registry("debugmodel")
    spec.model = tiny(size, layers)
    manager = EngineCheckpointManager if ours else CheckpointManager
    config = titan_trainers.Trainer.Config(
        model_spec=spec,
        dump_folder=root,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=manager.Config(enable=True, interval=interval, **settings),
        debug=DebugConfig(seed=seed),
    )
    built = config.build()
    for module in built.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return built


def titan_trainer(
    rank: int,
    world_size: int,
    root: str,
    seed: int,
    kill_at: int = -1,
    ours: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Six steps, saved every second step."""
    os.environ["LOCAL_RANK"] = str(rank)
    titan = trainer(root, seed, ours, **settings)
    torch.rand(1 + rank + 2 * seed)
    logged = {}

    def log(step: int, *numbers: Any, extra_metrics: Any) -> None:
        logged[step] = [*numbers, extra_metrics]
        if step == kill_at:
            titan.checkpointer.maybe_wait_for_saving()
            die()

    titan.metrics_processor.log = log
    titan.train()
    (model,), (optimizer,) = titan.model_parts, titan.optimizers
    position = titan.dataloader.dataset.position
    found = {"logged": logged, "position": position, **facts(model, optimizer)}
    titan.close()
    return found
