"""From a model's output to a loss that can be averaged over the items of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import InvalidArgument

__all__ = ["LossFunction", "ignored", "labels_in", "loss_of", "make_loss_function", "samples_in"]

IGNORED = -100  # a label that does not count

LossFunction = Callable[
    [Any, Tensor, float], Tensor
]  # (outputs, labels, items of the step) -> share of the mean


def ignored(labels: Tensor) -> Tensor:
    return labels == IGNORED


def labels_in(batch: Any) -> int:
    """Labels of a batch that count; its samples where it has none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return samples_in(batch) if labels is None else int((labels != IGNORED).sum())


def samples_in(batch: Any) -> int:
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, tuple | list)
        else [batch]
    )
    first = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
    return 1 if first is None else len(first)


def loss_of(outputs: Any) -> Tensor:
    """The loss that a model itself gives."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and not hasattr(outputs, "loss") and outputs:
        found = outputs[0]
    if found is None and isinstance(outputs, Tensor):
        found = outputs
    if not isinstance(found, Tensor):
        raise InvalidArgument(
            "model", type(outputs).__name__, "its output has no loss", "give a compute_loss_func"
        )
    return found


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    found: Tensor = (
        outputs["logits"]
        if isinstance(outputs, Mapping)
        else getattr(outputs, "logits", outputs[0])
    )
    return found


def make_loss_function(
    model: nn.Module,
    given: LossFunction | None,
    fused: Callable[[nn.Module], LossFunction] | None,
    smoothing: float,
) -> LossFunction | None:
    """None where the model's own loss counts."""
    if fused is not None:
        return fused(model)
    return smoothed(smoothing, shifts_labels(model)) if smoothing and given is None else given


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model compares position n with label n + 1, as Hugging Face's language models
    do."""
    return bool(
        getattr(
            model, "shifts_labels", type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        )
    )


def smoothed(epsilon: float, shift: bool) -> LossFunction:
    """(1 - e) x NLL + e x mean over classes of -log p, over labels that count."""

    def loss(outputs: Any, labels: Tensor, items: float) -> Tensor:
        logits = logits_of(outputs)
        if shift:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return (
            torch.nn.functional.cross_entropy(
                logits.flatten(0, -2).float(),
                labels.flatten(),
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=epsilon,
            )
            / items
        )

    return loss
