"""The owner decides what it takes: modules with loading code of their own are handed what was
saved, versions included; memory that several components share never takes the value of whoever came
last."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    InvalidState,
    LoadFailed,
    ModelState,
    SharingPattern,
    StateComponent,
    StateMismatch,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


class Doubling(nn.Module):
    """Version 2 stores the weight itself; version 1 stored half of it."""

    _version = 2

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class OnlyFirst(Doubling):
    """Takes states of its own version only, which is torch's default."""

    _version = 1

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version") != 1:
            raise ValueError(f"version {local_metadata.get('version')}")
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, *rest)


class Holder:
    """A Stateful around a module's own state_dict."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return {"inner": [self.module.state_dict()]}

    def load_state_dict(self, state: Any) -> None:
        self.module.load_state_dict(state["inner"][0])


WRAPS = {
    "alone": lambda m: m,
    "in a model": lambda m: nn.Sequential(nn.Linear(2, 2), m),
    "compiled": torch.compile,
    "by name": lambda m: ModelState({"a": m, "b": nn.Linear(1, 1)}),
    "held": Holder,
}


@pytest.mark.parametrize("kind", [Doubling, OnlyFirst])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("pattern", ["GLOBAL", "SHARDED"])
def test_c54_the_version_of_a_module_comes_back(
    tmp_path: Path, wrap: str, kind: Any, pattern: str
) -> None:
    module = kind(5.0)
    for resume in (1, 2, 3):
        with CheckpointManager(tmp_path) as ckpt:
            ckpt.save(
                resume, [StateComponent("model", WRAPS[wrap](module), SharingPattern(pattern))]
            )
            module = kind()
            ckpt.load([StateComponent("model", WRAPS[wrap](module), SharingPattern(pattern))])
        assert module.weight.tolist() == [5.0] * 3


def test_c54_parts_and_other_names_keep_their_versions(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(1, 1), Doubling(5.0))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": saved})
        part, other = nn.Sequential(nn.Linear(1, 1), Doubling()), nn.ModuleDict({"x": Doubling()})
        ckpt.load({"model": part}, keys="model/1.*")
        ckpt.load({"m": other}, keys=lambda name: "model/1.weight")
    assert (part[1].weight.tolist(), other["x"].weight.tolist()) == ([5.0] * 3, [5.0] * 3)


def test_c54_of_ranks_that_have_other_modules(tmp_path: Path) -> None:
    """Stages of a pipeline: the versions of all of them are beside the one table of tensors."""

    def stage(rank: int, value: float) -> nn.ModuleDict:
        return nn.ModuleDict({f"s{rank}": Doubling(value) if rank else nn.Linear(1, 1)})

    def program(comm: Any, value: float) -> Any:
        model = stage(comm.rank, value)
        parts = [StateComponent("model", model, SharingPattern.SHARDED)]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, parts) if value else ckpt.load(parts)
        return model["s1"].weight.tolist() if comm.rank else None

    run_ranks(2, lambda comm: program(comm, 5.0))
    assert run_ranks(2, lambda comm: program(comm, 0.0))[1] == [5.0] * 3
    whole = nn.ModuleDict({"s0": nn.Linear(1, 1), "s1": Doubling()})
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load({"model": whole})
    assert whole["s1"].weight.tolist() == [5.0] * 3


def test_c54_files_have_no_new_tensor_and_no_new_value(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": Doubling(1.0)})
    view = open_checkpoint(tmp_path / "checkpoint-1")
    assert [t.name for t in view.tensors()] == ["weight"]
    assert list(view.values("model")) == ["weight"]


def test_c54_what_an_earlier_version_saved_is_converted(tmp_path: Path) -> None:
    live = Doubling()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": dict(Doubling(5.0).state_dict())})  # nothing is known of versions
        ckpt.load({"model": live})
    assert live.weight.tolist() == [10.0] * 3


def test_c59_modules_that_resize_are_restored(tmp_path: Path) -> None:
    import torch.ao.quantization as quantization

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            return quantization.prepare_qat(model)

    model, fresh = make(0), make(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(3, 4))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        ckpt.load({"model": fresh})
    want, got = model.state_dict(), fresh.state_dict()
    assert all(want[k].shape == got[k].shape and torch.equal(want[k], got[k]) for k in want)


def test_c59_lazy_modules_are_restored(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, fresh = nn.Sequential(nn.LazyLinear(2)), nn.Sequential(nn.LazyLinear(2))
        model(torch.ones(1, 3))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        ckpt.load({"model": fresh})
    assert torch.equal(fresh[0].weight, model[0].weight)


class Growing(nn.Module):
    """Makes its buffers while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_pre_hook(Growing.make)

    def make(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for key in [k for k in state_dict if k.startswith(f"{prefix}seen_")]:
            self.register_buffer(key[len(prefix) :], torch.zeros_like(state_dict[key]))


def test_names_that_only_loading_code_can_judge(tmp_path: Path) -> None:
    model, fresh = nn.Sequential(Growing()), nn.Sequential(Growing())
    model[0].register_buffer("seen_a", torch.arange(3.0))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        ckpt.load({"model": fresh})
        assert fresh[0].seen_a.tolist() == [0.0, 1.0, 2.0]
        model[0].register_buffer("stray", torch.zeros(1))
        ckpt.save(2, {"model": model})
        with pytest.raises(
            LoadFailed, match=r"component 'model' on rank 0 .*0\.stray.*overwritten"
        ) as caught:
            ckpt.load({"model": nn.Sequential(Growing())})
        ckpt.load({"model": nn.Sequential(Growing())}, strict=False)
    assert caught.value.unexpected == ["0.stray"]


def test_extra_state_may_change_its_form(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def __init__(self, extra: Any) -> None:
            super().__init__(1, 1)
            self.extra = extra

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    saved = {"amax": torch.arange(4.0), "n": {"a": 1}}
    for fresh in ({}, torch.zeros(1), {"amax": torch.zeros(1)}):
        live = Counting(fresh)
        with CheckpointManager(tmp_path) as ckpt:
            ckpt.save(1, {"model": Counting(saved)}, overwrite=True)
            ckpt.load({"model": live})
        assert (live.extra["amax"].tolist(), live.extra["n"]) == ([0, 1, 2, 3], {"a": 1})


def test_dtypes_of_modules_with_hooks_change_only_when_asked(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": Doubling(5.0)})
        live = Doubling().to(torch.bfloat16)
        with pytest.raises(StateMismatch, match="cast=True"):
            ckpt.load({"model": live})
        assert not live.weight.any()
        report = ckpt.load({"model": live}, cast=True)
    assert (live.weight.tolist(), list(report.cast)) == ([5.0] * 3, ["model/weight"])


class Average:
    """Refers to the weights until its first update. `copies`: it loads into what it has."""

    def __init__(self, model: nn.Module, copies: bool = False) -> None:
        self.shadow, self.copies = dict(model.state_dict()), copies

    def state_dict(self) -> Any:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        for name, value in state["shadow"].items():
            if self.copies:
                self.shadow[name].copy_(value)
            else:
                self.shadow[name] = value


FORMS = {
    "dict": lambda m: dict(m.state_dict()),
    "state_dict": lambda m: m.state_dict(),
    "nested": lambda m: {"steps": 0, "of": [m.state_dict()]},
    "object": Average,
}


def averages(form: str, holder: Any) -> dict[str, torch.Tensor]:
    found = {"object": lambda: holder.shadow, "nested": lambda: holder["of"][0]}.get(
        form, lambda: holder
    )()
    return {name: t.detach().clone() for name, t in found.items()}


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[CheckpointManager, dict[str, Any], dict[str, Any]]]:
    """A run whose averages are no longer its weights."""
    torch.manual_seed(3)
    model = nn.Linear(3, 3)
    with CheckpointManager(tmp_path) as ckpt:
        yield ckpt, model, {name: t + 1.0 for name, t in model.state_dict().items()}


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", [("model", "ema"), ("ema", "model")])
def test_c53_weights_and_averages_both_come_back(
    trained, form: str, order: Any, transactional: bool
) -> None:
    ckpt, model, shadow = trained
    saved = {"nested": {"steps": 3, "of": [shadow]}, "object": Average(model)}.get(form, shadow)
    if form == "object":
        saved.shadow = shadow
    ckpt.save(1, {k: {"model": model, "ema": saved}[k] for k in order})
    fresh = nn.Linear(3, 3)
    live, address = {"model": fresh, "ema": FORMS[form](fresh)}, fresh.weight.data_ptr()
    ckpt.load({k: live[k] for k in order}, transactional=transactional)
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in fresh.state_dict().items())
    assert all(torch.equal(t, shadow[k]) for k, t in averages(form, live["ema"]).items())
    assert fresh.weight.data_ptr() == address
    if form != "object":
        with torch.no_grad():  # and they are no longer one
            fresh.weight.zero_()
        assert torch.equal(averages(form, live["ema"])["weight"], shadow["weight"])


@pytest.mark.parametrize("order", [("model", "ema"), ("ema", "model")])
def test_c53_equal_bytes_stay_one_memory(trained, order: Any) -> None:
    ckpt, model, _ = trained
    ckpt.save(1, {k: {"model": model, "ema": dict(model.state_dict())}[k] for k in order})
    fresh = nn.Linear(3, 3)
    live = {"model": fresh, "ema": dict(fresh.state_dict())}
    ckpt.load({k: live[k] for k in order})
    assert torch.equal(fresh.weight, model.weight)
    assert live["ema"]["weight"].data_ptr() == fresh.weight.data_ptr()


@pytest.mark.parametrize("order", [("model", "other"), ("other", "model")])
def test_c53_two_modules_of_one_memory_are_refused_before_anything_is_touched(
    trained, order: Any
) -> None:
    ckpt, model, shadow = trained
    other = nn.Linear(3, 3)
    other.load_state_dict(shadow)
    ckpt.save(1, {k: {"model": model, "other": other}[k] for k in order})
    fresh, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = fresh.weight
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(StateMismatch, match=r"other/weight|model/weight") as caught:
        ckpt.load({k: {"model": fresh, "other": second}[k] for k in order})
    assert "model" in str(caught.value) and "other" in str(caught.value)
    assert all(torch.equal(t, before[k]) for k, t in fresh.state_dict().items())


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("order", [("model", "ema"), ("ema", "model")])
def test_c53_an_object_that_copies_into_the_weights_is_found_out(
    trained, order: Any, transactional: bool
) -> None:
    ckpt, model, shadow = trained
    saved = Average(model)
    saved.shadow = shadow
    ckpt.save(1, {k: {"model": model, "ema": saved}[k] for k in order})
    fresh = nn.Linear(3, 3)
    before = copy.deepcopy(fresh.state_dict())
    live = {"model": fresh, "ema": Average(fresh, copies=True)}
    with pytest.raises(
        LoadFailed, match=r"'ema/shadow/(\w+)' shares memory with 'model/\1'"
    ) as caught:
        ckpt.load({k: live[k] for k in order}, transactional=transactional)
    assert ("as it was before the load" if transactional else "partly overwritten") in str(
        caught.value
    )
    assert not transactional or all(
        torch.equal(t, before[k]) for k, t in fresh.state_dict().items()
    )


def test_views_that_overlap_in_part_and_do_not_agree_are_refused(tmp_path: Path) -> None:
    whole = torch.zeros(6)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": {"a": torch.ones(4), "b": torch.full((4,), 2.0)}})
        with pytest.raises(LoadFailed, match="cannot hold two values"):
            ckpt.load({"v": {"a": whole[:4], "b": whole[2:]}}, transactional=True)
        assert not whole.any()
        ckpt.save(2, {"v": {"a": torch.ones(4), "b": torch.ones(4)}})
        ckpt.load({"v": {"a": whole[:4], "b": whole[2:]}})
    assert whole.tolist() == [1.0] * 6


def test_interleaved_views_of_a_fused_tensor_are_read_into_it(tmp_path: Path) -> None:
    fused = torch.zeros(4, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": {name: torch.full((4,), float(n)) for n, name in enumerate("qkv")}})
        ckpt.load({"v": {name: fused[:, n] for n, name in enumerate("qkv")}})
    assert fused.tolist() == [[0.0, 1.0, 2.0]] * 4


def test_c75_a_scaler_that_was_off_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    live = {"w": torch.zeros(3), "scaler": torch.amp.GradScaler("cpu", enabled=True)}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(
            1, {"w": torch.full((3,), 5.0), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
        )
        with pytest.raises(StateMismatch, match="component 'scaler'"):
            ckpt.load(live)
    assert not live["w"].any()


def test_loading_into_a_meta_device_says_what_to_do(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2)})
        with pytest.raises(InvalidState, match=r"'weight' is on the meta device.*to_empty"):
            ckpt.load({"model": nn.Linear(2, 2, device="meta")})


class Sink:
    """Has nothing yet."""

    got: Any = None

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.got = state


@pytest.mark.parametrize("pattern", ["GLOBAL", "SHARDED"])
@pytest.mark.parametrize("live", [Sink, dict])
def test_who_has_nothing_yet_is_handed_all_of_it(tmp_path: Path, pattern: str, live: Any) -> None:
    from ckptcore import Shard

    def save(comm: Any) -> None:
        half = Shard(torch.full((2,), float(comm.rank)), (4,), (2 * comm.rank,))
        weight = half if pattern == "SHARDED" else torch.tensor([0.0, 0.0, 1.0, 1.0])
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1, [StateComponent("model", {"weight": weight, "n": 3}, SharingPattern(pattern))]
            )

    run_ranks(2, save)
    holder = live()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load([StateComponent("model", holder, SharingPattern(pattern))])
    got = holder.got if live is Sink else holder
    assert (got["weight"].tolist(), got["n"]) == ([0.0, 0.0, 1.0, 1.0], 3)


def test_an_owner_is_handed_fresh_memory(tmp_path: Path) -> None:
    """A Stateful that keeps its tensors decides when they change."""

    class Keeps:
        def __init__(self, value: float) -> None:
            self.live = torch.full((2,), value)

        def state_dict(self) -> Any:
            return OrderedDict(t=self.live)

        def load_state_dict(self, state: Any) -> None:
            assert self.live.tolist() == [0.0, 0.0]
            raise ValueError("not now")

    live = Keeps(0.0)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"k": Keeps(1.0)})
        with pytest.raises(CheckpointError, match="not now"):
            ckpt.load({"k": live})
    assert live.live.tolist() == [0.0, 0.0]
