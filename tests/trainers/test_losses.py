"""What a loss is averaged over: the labels that count, of all ranks, wherever they are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ckpt_trainers.losses import CrossEntropy, causal_lm_loss
from torch import Tensor, nn
from torch.nn import functional as F

QUIET = {"save_strategy": "no", "logging_strategy": "no"}


class Table(nn.Module):
    """Logits by input byte, and the mean loss of the labels that count, as Hugging Face's models
    give it."""

    shifts_labels = True

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(256, 256, generator=generator) / 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        flat = logits[:, :-1].flatten(0, 1)
        return SimpleNamespace(
            logits=logits, loss=F.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=-100)
        )


class Holes:
    """Samples with different numbers of labels that count."""

    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        item = self.windows[number]
        labels = item["labels"].clone()
        labels[: number % 7] = -100
        return {**item, "labels": labels}


def holes(tiny: Any, samples: int) -> Holes:
    return Holes(tiny.windows(samples, noisy=False))


def whole(data: Holes) -> dict[str, Tensor]:
    items = [data[number] for number in range(len(data))]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def table_run(tiny: Any, run: str, **options: Any) -> Any:
    options = {"model_init": Table, "compute_loss_func": None, **QUIET, **options}
    return tiny.trainer(run, **options)


def smoothed(table: Tensor, batch: dict[str, Tensor], epsilon: float) -> Tensor:
    """transformers' LabelSmoother with shift_labels, written out."""
    log_p = torch.log_softmax(table[batch["input_ids"]][:, :-1].double(), -1)
    labels = batch["labels"][:, 1:]
    counts = labels != -100
    nll = -log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    each = (1 - epsilon) * nll - epsilon * log_p.mean(-1)
    return each[counts].mean()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_smoothed_labels_that_the_model_shifts_are_averaged_over_those_that_it_sums(
    tiny: Any, accumulation: int
) -> None:
    data = holes(tiny, 6)
    notes = tiny.notes()
    trainer = table_run(
        tiny,
        f"by-{accumulation}",
        notes=notes,
        train_dataset=data,
        eval_dataset=data,
        label_smoothing_factor=0.1,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=6 // accumulation,
        max_steps=1,
    )
    expected = float(smoothed(trainer.model.table.detach(), whole(data), 0.1))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    trainer.train()
    assert float.fromhex(notes.steps[1]["loss"]) == pytest.approx(expected, rel=1e-6)


def test_a_ready_loss_accumulates_what_a_causal_model_computes_at_once(tiny: Any) -> None:
    losses, weights = [], []
    for accumulation, function in ((1, None), (1, causal_lm_loss), (3, causal_lm_loss)):
        notes = tiny.notes()
        trainer = table_run(
            tiny,
            f"{accumulation}-{function}",
            notes=notes,
            train_dataset=holes(tiny, 6),
            compute_loss_func=function,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=6 // accumulation,
            max_steps=3,
            optim="sgd",
        )
        trainer.train()
        losses.append([float.fromhex(step["loss"]) for step in notes.steps.values()])
        weights.append(trainer.model.table.detach())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(weights[2], weights[0])


def test_a_models_own_loss_counts_by_the_labels_of_all_ranks(tiny: Any) -> None:
    """A rank with few labels weighs little: the sum of the ranks' shares is the mean of all."""
    data = holes(tiny, 6)
    batch = whole(data)
    parts = [{name: value[at : at + 2] for name, value in batch.items()} for at in (0, 2, 4)]
    trainer = table_run(tiny, "run", train_dataset=data)
    counts = [trainer.items_in(part) for part in parts]
    assert counts == [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    assert len(set(counts)) > 1
    items = trainer.items_of([(part, 2, 6) for part in parts])
    assert items == sum(counts)
    shares = [trainer.loss_share(part, 2, items) for part in parts]
    expected = trainer.model(**batch).loss.detach()
    assert float(sum(shares).detach()) == pytest.approx(float(expected), rel=1e-6)
    assert trainer.loss_share(parts[0], 0, items).item() == 0.0  # a batch lent by another rank
    # An evaluation in batches of two, as if it were one.
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_the_loss_is_its_formula() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, 6, 1]])
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 4.0
    for outputs in (logits, {"logits": logits}, SimpleNamespace(logits=logits), (logits,)):
        assert torch.equal(CrossEntropy()(outputs, labels, 4.0), plain)
    shifted = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    assert torch.equal(causal_lm_loss(logits, labels, 1.0), shifted)
