"""Norms of weights and gradients, also of models whose parameters are spread over the ranks."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize

from .logs import JsonRecords
from .protocol import TrainerCallback, TrainerState

log = logging.getLogger(__name__)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each, on the device. Collective where tensors are spread over ranks."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    with torch.no_grad():
        norms = torch._foreach_norm(local, 2, dtype=torch.float32)
        squares = torch.stack([norm.to(local[0].device) for norm in norms]).square()
    meshes: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            meshes.setdefault(mesh, []).append(number)
            for dim, placement in enumerate(tensor.placements):
                if placement.is_replicate():  # counted by each of these ranks
                    squares[number] /= mesh.size(dim)
    for mesh, numbers in meshes.items():
        part = squares[numbers]
        for dim in range(mesh.ndim):
            dist.all_reduce(part, group=mesh.get_group(dim))
        squares[numbers] = part
    return squares


class _Watcher(TrainerCallback):
    """They stay off, with one warning, where there is nothing to look at."""

    _off = False

    def _turn_off(self, state: TrainerState, reason: str) -> None:
        if not self._off and state.is_world_process_zero:
            log.warning("%s is off: %s", self.name, reason)
        self._off = True

    def _takes_part(self, state: TrainerState, model: Any) -> bool:
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        if not self._off and (not parameters or parameters[0].is_meta):  # a pipeline's shell
            self._turn_off(state, "the model has no weights here")
        # All ranks, where parameters are spread over them.
        spread = any(isinstance(parameter, DTensor) for parameter in parameters)
        return not self._off and (state.is_world_process_zero or spread)


class WeightNormLogger(_Watcher):
    """Adds weight_norm, that of all parameters, to the logs; growth hints at weak weight decay."""

    def on_log_step(
        self, state: TrainerState, logs: dict[str, Any], model: Any = None, **_: Any
    ) -> None:
        if self._takes_part(state, model):
            logs["weight_norm"] = squared_norms(list(model.parameters())).sum().sqrt().item()


class _NormFile(JsonRecords, _Watcher):
    """One that writes a file of records; it is off, without a word, where there is no folder."""

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any, **_: Any) -> None:
        self._off = trainer.logging_dir is None
        super().on_train_begin(args, state, trainer)


class GradNormLogger(_NormFile):
    """Writes the norm of each parameter's gradient, as the optimizer got it, to
    `<logging_dir>/gradient_norms.json` at every evaluation, also one that nobody could foresee.

    The gradients of a step are kept until the next one begins: that costs no time, and memory only
    while training does not need it.
    """

    file_name = "gradient_norms.json"

    def __init__(self) -> None:
        super().__init__()
        self._gradients: dict[str, Tensor] = {}

    def on_step_begin(self, **_: Any) -> None:
        self._gradients = {}

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, model: Any = None, **_: Any
    ) -> None:
        if not self._off and getattr(args, "fuse_optim_with_backward", False):
            self._turn_off(state, "with fuse_optim_with_backward there are no gradients to look at")
        if self._takes_part(state, model):
            named = model.named_parameters()
            self._gradients = {name: p.grad for name, p in named if p.grad is not None}

    def on_evaluate(self, state: TrainerState, **_: Any) -> None:
        gradients, self._gradients = self._gradients, {}
        if gradients:
            norms = squared_norms(list(gradients.values())).sqrt().tolist()
            self.write(state, {"grad_norms": dict(zip(gradients, norms, strict=True))})

    def close(self) -> None:
        self._gradients = {}
        super().close()


class ParameterNormLogger(_NormFile):
    """Writes norms and spectral norms of the parameters to `<logging_dir>/parameter_norms.json` at
    every evaluation.

    Spectral norms (the largest singular value of a parameter as a matrix) are found by power
    iteration, in power_iter_steps steps from where the last evaluation ended, twice as many at the
    first one.
    """

    file_name = "parameter_norms.json"

    def __init__(
        self, log_norms: bool = True, log_spectral_norms: bool = True, power_iter_steps: int = 10
    ) -> None:
        super().__init__()
        self.log_norms, self.log_spectral_norms = log_norms, log_spectral_norms
        self.power_iter_steps = power_iter_steps
        self._vectors: dict[str, Tensor] = {}
        self._first = True

    @torch.no_grad()
    def on_evaluate(self, state: TrainerState, model: Any = None, **_: Any) -> None:
        if not self._takes_part(state, model):
            return
        parameters = dict(model.named_parameters())
        values = squared_norms(list(parameters.values())).sqrt().tolist()
        norms = dict(zip(parameters, values, strict=True))
        record = {"norms": norms} if self.log_norms else {}
        if self.log_spectral_norms:
            sigmas: dict[str, Tensor] = {}
            for name, p in parameters.items():
                whole = p.full_tensor() if isinstance(p, DTensor) and p.ndim > 1 else p
                if p.ndim > 1 and state.is_world_process_zero:
                    sigmas[name] = self._largest(name, whole.float().reshape(len(whole), -1))
            # One read from the device. Of vectors the norm is the same.
            values = torch.stack(list(sigmas.values())).tolist() if sigmas else []
            found = dict(zip(sigmas, values, strict=True))
            record["spectral_norms"] = norms | found
            for name, value in found.items():
                if not value > 0:
                    del self._vectors[name]  # leads nowhere
            self._first = False
        self.write(state, record)

    def _largest(self, name: str, matrix: Tensor) -> Tensor:
        u = self._vectors.get(name)
        if u is None or len(u) != len(matrix):
            # A generator of its own: the process's random numbers are the model's.
            source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            u = torch.randn(len(matrix), generator=source)
        u = u.to(matrix.device)
        v = u.new_zeros(matrix.shape[1])
        for _ in range(self.power_iter_steps * (2 if self._first else 1)):
            v = normalize(matrix.T @ u, dim=0)
            u = normalize(matrix @ v, dim=0)
        self._vectors[name] = u
        return u @ (matrix @ v)
