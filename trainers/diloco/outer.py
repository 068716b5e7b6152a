"""The outer step: global parameters, and the optimizer that moves them by what workers found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptcore import OptimizerState

from .wire import DiLoCoError, Layout

__all__ = ["DelayedNesterov", "GlobalModel", "named_parameters", "nesterov"]

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]

nesterov: OptimizerFactory = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class DelayedNesterov(torch.optim.Optimizer):
    """Nesterov's momentum for gradients that come one at a time, from workers at different speeds:
    the momentum moves once for every `delay` of them (arXiv 2401.09135, algorithm 3).

    params: parameters or groups of them. lr: number, step size (default 0.7). momentum: number,
    decay of the momentum (default 0.9). delay: int, gradients to a move of the momentum (default
    1, which is Nesterov's own method).
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, delay: int = 1
    ) -> None:
        if delay < 1:
            raise ValueError(f"delay={delay}: give a whole number from 1 up")
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            lr, momentum, delay = group["lr"], group["momentum"], group["delay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["delayed"], state["count"] = torch.zeros_like(parameter), 0
                parameter.add_(parameter.grad, alpha=-lr / delay)
                state["delayed"].add_(parameter.grad)
                state["count"] += 1
                if state["count"] == delay:
                    moved = state["momentum_buffer"]
                    moved.mul_(momentum).add_(state["delayed"], alpha=1 / delay)
                    parameter.add_(moved, alpha=-lr * momentum)
                    state["delayed"].zero_()
                    state["count"] = 0


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What islands share of a model: each parameter that is trained once, by the name that it has
    without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name.removeprefix("module.").replace("_orig_mod.", "")] = parameter
    if not found:
        raise DiLoCoError("the model has no parameter that is trained: there is nothing to share")
    return found


class GlobalModel:
    """The global parameters in `dtype` on the CPU, and the outer optimizer over them.

    parameters: a module, or tensors by name. optimizer: makes the outer optimizer of the
    parameters. dtype: of parameters, mean and step. float64 gives a lone worker's parameters back
    to the last bit from SGD(lr=1), which float32 cannot: in it g - (g - l) is not always l.
    """

    def __init__(
        self,
        parameters: nn.Module | Mapping[str, Tensor],
        optimizer: OptimizerFactory = nesterov,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if isinstance(parameters, nn.Module):
            parameters = named_parameters(parameters)
        self.layout = Layout.of(parameters)
        self.dtype = dtype
        self.parameters = {
            spec.name: nn.Parameter(
                parameters[spec.name].detach().to("cpu", dtype, copy=True).contiguous()
            )
            for spec in self.layout.specs
        }
        self.optimizer = optimizer(list(self.parameters.values()))

    def snapshot(self, layout: Layout) -> dict[str, Tensor]:
        """Copies of some parameters, in the dtypes of the model."""
        return {
            spec.name: self.parameters[spec.name].detach().to(spec.dtype, copy=True)
            for spec in layout.specs
        }

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """One outer step by the mean of the workers' pseudo-gradients, summed in this order."""
        for name in gradients[0]:
            total = gradients[0][name].to(self.dtype, copy=True)
            for other in gradients[1:]:
                total += other[name].to(self.dtype)
            self.parameters[name].grad = total.div_(len(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def components(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        plain = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"model": plain, "optimizer": OptimizerState(self.optimizer, self.parameters)}
