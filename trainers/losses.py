"""From a model's output to a loss that can be averaged over the items of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .arguments import InvalidArgument

IGNORED = -100  # a label that does not count

# (outputs, labels, items of the step) -> share of the mean
LossFunction = Callable[[Any, Tensor, float], Tensor]


@dataclass(frozen=True)
class CrossEntropy:
    """A loss function for accumulated batches: the sum over the labels of a batch that count,
    divided by `items`, those of the whole step.

    shifts_labels: compare position n with label n + 1, as Hugging Face's language models do
        (default False: with label n).
    smoothing: share e of the mean over all classes, (1 - e) NLL + e mean(-log p) (default 0).
    """

    shifts_labels: bool = False
    smoothing: float = 0.0

    def __call__(self, outputs: Any, labels: Tensor, items: float) -> Tensor:
        logits = logits_of(outputs)
        if self.shifts_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        total = F.cross_entropy(
            logits.flatten(0, -2).float(),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.smoothing,
        )
        return total / items


# compute_loss_func for Hugging Face's causal language models, so that gradients accumulate exactly.
causal_lm_loss = CrossEntropy(shifts_labels=True)


def make_loss_function(
    model: nn.Module,
    given: LossFunction | None,
    fused: Callable[[nn.Module], LossFunction] | None,
    smoothing: float,
) -> LossFunction | None:
    """None where the model's own loss counts."""
    if fused is not None:
        return fused(model)
    if smoothing and given is None:
        return CrossEntropy(shifts_labels(model, None), smoothing)
    return given


def shifts_labels(model: nn.Module, loss_function: LossFunction | None) -> bool:
    """Whether position n is compared with label n + 1, so that a row's first one is left out."""
    if loss_function is not None:
        return bool(getattr(loss_function, "shifts_labels", False))
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return bool(getattr(model, "shifts_labels", causal))


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch, where it has some."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def count_labels(labels: Tensor, shifted: bool) -> int:
    """Labels that count. shifted: but for the first of each row."""
    counted = labels[..., 1:] if shifted and labels.dim() else labels
    return int((counted != IGNORED).sum())


def _named(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def loss_of(outputs: Any) -> Tensor:
    """The loss that a model itself gives. Raises InvalidArgument."""
    found = outputs if isinstance(outputs, Tensor) else _named(outputs, "loss")
    if found is None and isinstance(outputs, tuple) and not hasattr(outputs, "loss") and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        kind, instead = type(outputs).__name__, "give a compute_loss_func"
        raise InvalidArgument("model", kind, "its output has no loss", instead)
    return found


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's output."""
    found = outputs if isinstance(outputs, Tensor) else _named(outputs, "logits")
    logits: Tensor = outputs[0] if found is None else found
    return logits
