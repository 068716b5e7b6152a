"""A run small enough to be trained dozens of times: 27 windows in 7 batches of 4, the last of them of 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ckpt_trainers.arguments import GPTArguments, TrainingArguments


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are the same to the last bit only when they are split in the same way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """460 bytes: 437 to train on, 23 to validate."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes((i * i + 7 * i) % 251 for i in range(460)))
    return path


@pytest.fixture
def make_args(tmp_path: Path, text: Path) -> Callable[..., TrainingArguments]:
    def make(run: str = "run", **changes: object) -> TrainingArguments:
        values: dict[str, object] = {
            "output_dir": str(tmp_path / run),
            "data": [str(text)],
            "model": GPTArguments(n_layer=2, n_head=2, n_embd=16, block_size=16, dropout=0.2),
            "max_steps": 20,
            "save_steps": 5,
            "save_total_limit": None,
            "logging_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "max_grad_norm": 1.0,
            "weight_decay": 0.01,
            "seed": 5,
            "disable_tqdm": True,
        }
        return TrainingArguments(**{**values, **changes})  # type: ignore[arg-type]

    return make
