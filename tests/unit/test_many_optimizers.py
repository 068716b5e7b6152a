"""One optimizer for each parameter, as components: a model is walked once in each step, however
many there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, InvalidState, OptimizerState


def make(layers: int, seed: int) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
    optimizers = {
        name: torch.optim.SGD([p], lr=0.1, momentum=0.9) for name, p in model.named_parameters()
    }
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    for optimizer in optimizers.values():
        optimizer.step()
    return model, optimizers


def declared(
    wrapped: bool, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, object]:
    each = {
        f"opt.{name}": OptimizerState(o, model) if wrapped else o for name, o in optimizers.items()
    }
    return {"model": model, **each}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """walks(call): how often a module's parameters were gone through."""
    original, seen = nn.Module.named_parameters, []

    def counted(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_parameters", counted)

    def count(call: Callable[[], object]) -> int:
        seen.clear()
        call()
        return len(seen)

    return count


def walked(walks, folder: Path, layers: int, wrapped: bool) -> list[int]:
    model, optimizers = make(layers, 1)
    fresh, its = make(layers, 2)
    with CheckpointManager(folder) as ckpt:
        found = [
            walks(lambda: ckpt.save(1, declared(wrapped, model, optimizers))),
            walks(lambda: ckpt.save_async(2, declared(wrapped, model, optimizers)).result()),
            walks(lambda: ckpt.restore(declared(wrapped, fresh, its))),
        ]
    for name, optimizer in optimizers.items():
        (mine,), (loaded,) = optimizer.state.values(), its[name].state.values()
        assert torch.equal(mine["momentum_buffer"], loaded["momentum_buffer"])
    return found


@pytest.mark.parametrize("wrapped", [True, False])
def test_walks_do_not_grow_with_the_number_of_optimizers(
    wrapped: bool, walks, tmp_path: Path
) -> None:
    assert walked(walks, tmp_path / "few", 3, wrapped) == walked(
        walks, tmp_path / "many", 12, wrapped
    )


def test_a_module_that_changed_since_is_looked_at_again(tmp_path: Path) -> None:
    model, optimizers = make(2, 1)
    kept = OptimizerState(optimizers["0.weight"], model)
    model.add_module("late", nn.Linear(2, 2))
    late = torch.optim.SGD(model.late.parameters(), lr=0.1)
    assert list(OptimizerState(late, model).state_dict()["group_of"]) == [
        "late.weight",
        "late.bias",
    ]
    model.add_module("moved", model._modules.pop("0"))
    assert list(kept.state_dict()["group_of"]) == ["moved.weight"]
    model._modules["moved"] = nn.Linear(2, 2)
    with (
        pytest.raises(InvalidState, match="in none of the models"),
        CheckpointManager(tmp_path) as ckpt,
    ):
        ckpt.save(1, {"opt": kept})
    assert not any(tmp_path.iterdir())


def test_a_table_does_not_keep_a_model_alive() -> None:
    import weakref

    model, optimizers = make(1, 1)
    OptimizerState(optimizers["0.bias"], model)
    gone = weakref.ref(model)
    del model, optimizers
    import gc

    gc.collect()
    assert gone() is None
