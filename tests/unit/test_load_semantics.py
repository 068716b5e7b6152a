"""What a load checks before it touches live state, and what it then does to it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    StateComponent,
    StateMismatch,
    Value,
)


@pytest.fixture
def ckpt(tmp_path: Path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path)
    state = {
        "net": {
            "w": torch.tensor([1.0, 2.0]),
            "b": torch.tensor([3.0]),
            "meta": {"name": "x", "n": 5},
        },
        "opt": {"m": torch.tensor([4.0])},
    }
    manager.save(7, state)
    return manager


def live(**changes) -> dict:
    net = {"w": torch.zeros(2), "b": torch.zeros(1), "meta": {"name": "", "n": 0}}
    return {"net": {**net, **changes}, "opt": {"m": torch.zeros(1)}}


def parameters(**shapes) -> nn.ParameterDict:
    """A module: what it has is its own, and names, shapes and dtypes count."""
    return nn.ParameterDict({k: nn.Parameter(v, requires_grad=False) for k, v in shapes.items()})


@pytest.fixture
def modules(tmp_path: Path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path / "modules")
    net = parameters(w=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0]))
    manager.save(7, {"net": net, "opt": {"m": torch.tensor([4.0])}})
    return manager


def live_modules(**changes) -> dict:
    return {
        "net": parameters(**{"w": torch.zeros(2), "b": torch.zeros(1), **changes}),
        "opt": {"m": torch.zeros(1)},
    }


def untouched(state: dict) -> bool:
    return all(not t.any() for part in state.values() for t in part.values() if torch.is_tensor(t))


def test_tensors_in_place_and_values_in_the_report(ckpt) -> None:
    state = live()
    address = state["net"]["w"].data_ptr()
    report = ckpt.load(state)
    assert (report.step, report.fresh, report.missing, report.unexpected, report.cast) == (
        7,
        False,
        [],
        [],
        {},
    )
    assert report.path == f"{ckpt.root}/checkpoint-7"
    assert report.manifest.step == 7
    assert report.values["net"]["meta"] == {"name": "x", "n": 5}
    assert report.values["net"]["w"] is state["net"]["w"]
    assert state["net"]["w"].tolist() == [1.0, 2.0]
    assert state["net"]["w"].data_ptr() == address
    assert state["opt"]["m"].tolist() == [4.0]


@pytest.mark.parametrize("transactional", [False, True])
def test_missing_and_unexpected_keys(modules, transactional: bool) -> None:
    state = live_modules(extra=torch.zeros(1))
    del state["net"]["b"]
    with pytest.raises(StateMismatch, match=r"'net/extra'.*'net/b'.*strict=False") as caught:
        modules.load(state, transactional=transactional)
    assert (caught.value.missing, caught.value.unexpected) == (["net/extra"], ["net/b"])
    assert untouched(state)
    report = modules.load(state, strict=False, transactional=transactional)
    assert (report.missing, report.unexpected) == (["net/extra"], ["net/b"])
    assert state["net"]["w"].tolist() == [1.0, 2.0]
    assert state["net"]["extra"].tolist() == [0.0]


@pytest.mark.parametrize("transactional", [False, True])
def test_plain_values_come_back_as_saved(ckpt, transactional: bool, same) -> None:
    state = live(extra=torch.zeros(1), meta={"name": "", "other": 1})
    del state["net"]["b"]
    net, meta, w = state["net"], state["net"]["meta"], state["net"]["w"]
    report = ckpt.load(state, transactional=transactional)
    assert (report.missing, report.unexpected) == ([], [])
    saved = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0]), "meta": {"name": "x", "n": 5}}
    same(net, saved)
    assert state["net"] is net is report.values["net"]
    assert (net["meta"] is meta, net["w"] is w) == (True, True)


def test_plain_values_that_are_not_in_the_checkpoint_stay_when_not_strict(ckpt, same) -> None:
    state = live(extra=torch.zeros(1), meta={"name": "", "other": 1})
    report = ckpt.load(state, strict=False)
    assert (report.missing, report.unexpected) == (["net/meta/other", "net/extra"], ["net/meta/n"])
    same(state["net"]["meta"], {"name": "x", "n": 5, "other": 1})
    assert (state["net"]["extra"].tolist(), state["net"]["w"].tolist()) == ([0.0], [1.0, 2.0])


def test_what_a_plain_dict_only_refers_to_must_be_there(ckpt) -> None:
    """Another tensor in the place of a parameter, or of a part of one, would not reach whoever uses
    it."""
    module, whole = nn.Linear(2, 1), torch.zeros(4)
    for refers, name in [
        ({"w": torch.zeros(2), "x": module.weight}, "net/x"),
        ({"w": torch.zeros(2), "x": whole[:2]}, "net/x"),
        ({"inner": module.state_dict()}, "net/inner/weight"),
    ]:
        with pytest.raises(StateMismatch) as caught:
            ckpt.load({"net": refers, "opt": {"m": torch.zeros(1)}})
        assert name in (caught.value.missing or [])
    with pytest.raises(StateMismatch) as caught:
        ckpt.load({"net": {"w": whole[1:]}, "opt": {"m": torch.zeros(1)}})
    assert caught.value.mismatched == {"net/w": ("F32 [2]", "F32 [3]")}
    assert not whole.any()


def test_missing_and_unexpected_components(ckpt) -> None:
    state = {**live(), "ema": {"w": torch.zeros(1)}}
    del state["opt"]
    with pytest.raises(StateMismatch) as caught:
        ckpt.load(state)
    # A load is of what it is given; components that only the checkpoint has are an error of a
    # restore.
    assert (caught.value.missing, caught.value.unexpected) == (["ema"], [])
    assert untouched(state)
    for which in ("auto", 7):
        with pytest.raises(StateMismatch) as caught:
            ckpt.restore(state, which)
        assert (caught.value.missing, caught.value.unexpected) == (["ema"], ["opt"])
        assert untouched(state)
    report = ckpt.load(state, strict=False)
    assert (report.missing, report.unexpected) == (["ema"], ["opt"])
    assert state["net"]["b"].tolist() == [3.0]


def test_components_that_are_not_required(ckpt) -> None:
    parts = [StateComponent(key, value) for key, value in live().items()]
    extra = {"w": torch.zeros(1)}
    report = ckpt.load([*parts, StateComponent("ema", extra, required=False)])
    assert report.step == 7
    assert extra["w"].tolist() == [0.0]
    with pytest.raises(StateMismatch):
        ckpt.load([*parts, StateComponent("ema", extra)])


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_in_common_always_raises(modules, strict: bool) -> None:
    for state in (
        {"other": {"w": torch.zeros(2)}},
        {"net": parameters(x=torch.zeros(2)), "opt": {"m": torch.zeros(1)}},
        {"net": nn.ModuleDict({"x": parameters(w=torch.zeros(2))}), "opt": {"m": torch.zeros(1)}},
    ):
        with pytest.raises(StateMismatch):
            modules.load(state, strict=strict)
        assert untouched({k: v for k, v in state.items() if k != "net" or "w" in v})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("cast", [True, False])
def test_shapes_are_never_changed(modules, strict: bool, cast: bool) -> None:
    for shape in ((3,), (2, 1), (1, 2), ()):
        state = live_modules(w=torch.zeros(shape))
        with pytest.raises(StateMismatch, match="'net/w'") as caught:
            modules.load(state, strict=strict, cast=cast)
        assert caught.value.mismatched == {"net/w": ("F32 [2]", f"F32 {list(shape)}")}
        assert untouched(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("transactional", [False, True])
def test_dtypes_change_only_when_asked(modules, dtype: torch.dtype, transactional: bool) -> None:
    state = live_modules(w=torch.zeros(2, dtype=dtype))
    with pytest.raises(StateMismatch, match="cast=True") as caught:
        modules.load(state, strict=False, transactional=transactional)
    assert list(caught.value.mismatched) == ["net/w"]
    assert untouched(state)
    report = modules.load(state, cast=True, transactional=transactional)
    assert list(report.cast) == ["net/w"]
    assert report.cast["net/w"].startswith("F32 -> ")
    assert state["net"]["w"].dtype is dtype
    assert torch.equal(state["net"]["w"], torch.tensor([1.0, 2.0]).to(dtype))


@pytest.mark.parametrize("cast", [True, False])
def test_plain_tensors_of_another_dtype_or_shape(ckpt, cast: bool) -> None:
    state = live(w=torch.zeros(2, dtype=torch.bfloat16), b=torch.zeros(3))
    w = state["net"]["w"]
    report = ckpt.load(state, cast=cast)
    assert state["net"]["b"].tolist() == [3.0]
    assert (state["net"]["w"] is w, list(report.cast)) == (
        (True, ["net/w"]) if cast else (False, [])
    )
    assert state["net"]["w"].dtype is (torch.bfloat16 if cast else torch.float32)
    assert state["net"]["w"].tolist() == [1.0, 2.0]


def test_casting_a_model(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2).to(torch.bfloat16)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": source})
        with pytest.raises(StateMismatch):
            ckpt.load({"model": target})
        report = ckpt.load({"model": target}, cast=True)
    assert set(report.cast) == {"model/weight", "model/bias"}
    assert torch.equal(target.weight, source.weight.to(torch.bfloat16))
    assert target.weight.requires_grad


def test_complex_is_never_cast_to_real(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": parameters(w=torch.ones(2, dtype=torch.complex64))})
        with pytest.raises(StateMismatch):
            ckpt.load({"c": parameters(w=torch.zeros(2))}, cast=True)


def damage(ckpt: CheckpointManager, component: str, nbytes: int) -> None:
    """Flip the last bit of a component's tensor file."""
    file = Path(ckpt.root) / "checkpoint-7" / f"{component}.safetensors"
    data = bytearray(file.read_bytes())
    data[-nbytes] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("component", ["net", "opt"])
def test_damage_with_transactional_leaves_live_state_alone(ckpt, component: str) -> None:
    damage(ckpt, component, 1)
    state = live()
    with pytest.raises(CheckpointCorrupt) as caught:
        ckpt.load(state, transactional=True)
    assert caught.value.file == f"{component}.safetensors"
    assert caught.value.tensor.startswith(f"{component}/")
    assert caught.value.kind == "digest"
    assert "partly overwritten" not in str(caught.value)
    assert untouched(state)


def test_damage_without_transactional_says_what_it_did(ckpt) -> None:
    damage(ckpt, "opt", 1)
    with pytest.raises(CheckpointCorrupt, match=r"opt/m.*partly overwritten.*transactional=True"):
        ckpt.load(live())


def test_transactional_leaves_objects_alone_too(ckpt) -> None:
    class Strict:
        loaded = None

        def state_dict(self) -> dict:
            return {"m": torch.zeros(1)}

        def load_state_dict(self, state: dict) -> None:
            self.loaded = state

    damage(ckpt, "net", 1)
    opt = Strict()
    with pytest.raises(CheckpointCorrupt):
        ckpt.load({"net": live()["net"], "opt": opt})
    assert opt.loaded is None


def test_which_checkpoint(ckpt, tmp_path: Path) -> None:
    ckpt.save(9, live())
    for step, expected in [
        ("latest", 9),
        (7, 7),
        (9, 9),
        (str(tmp_path / "checkpoint-7"), 7),
        (tmp_path / "checkpoint-7", 7),
    ]:
        assert ckpt.load(live(), step).step == expected, step
    with pytest.raises(CheckpointNotFound) as caught:
        ckpt.load(live(), 8)
    assert (caught.value.step, caught.value.available) == (8, [7, 9])
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointNotFound):
        ckpt.load(live(), str(tmp_path / "none"))
    with pytest.raises(CheckpointNotFound, match="no checkpoint yet"):
        CheckpointManager(tmp_path / "empty").load(live())


@pytest.mark.parametrize(
    "state",
    [{}, [], 5, None, "text", [1, 2], {"": {"a": 1}}, {"a/b": {"a": 1}}, {5: {"a": 1}}, {"a\0": 1}],
)
def test_states_that_are_none(state, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(InvalidState):
            ckpt.save(1, state)
        with pytest.raises(InvalidState):
            ckpt.load(state)
    assert list(tmp_path.iterdir()) == []


def test_two_components_of_one_key(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(InvalidState, match="'a'") as caught:
        ckpt.save(1, [StateComponent("a", {"x": 1}), StateComponent("a", {"x": 2})])
    assert caught.value.component == "a"


@pytest.mark.parametrize(
    "key",
    [
        "model",
        "a b",
        "ü" * 40,
        "..",
        ".hidden",
        "con",
        "a%b",
        "index.rank00000",
        "x" * 80,
        "\ud800",
    ],
)
def test_component_keys_of_any_text(key: str, tmp_path: Path) -> None:
    # Stored and found again, or refused before a byte is written.
    state = {key: {"w": torch.zeros(1)}, "other": {"a": 0}}
    with CheckpointManager(tmp_path) as ckpt:
        try:
            ckpt.save(1, {key: {"w": torch.ones(1)}, "other": {"a": 1}})
        except InvalidState as error:
            assert error.component
            assert list(tmp_path.iterdir()) == []
            assert key == "\ud800"
            return
        ckpt.load(state)
        assert ckpt.verify() == []
    assert state[key]["w"].tolist() == [1.0]
    assert [p.parent for p in tmp_path.rglob("*.safetensors")] == [tmp_path / "checkpoint-1"]


def test_a_provider_is_a_state(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self, value: float) -> None:
            self.w = torch.full((2,), value)

        def get_state_components(self) -> list[StateComponent]:
            return [StateComponent("w", {"w": self.w}, metadata={"why": "test"})]

        def get_process_groups(self) -> dict:
            return {}

    live = Trainer(0.0)
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, Trainer(3.0))
        ckpt.load(live)
    assert live.w.tolist() == [3.0, 3.0]
    assert info.manifest.components["w"].metadata == {"why": "test"}


@pytest.mark.parametrize(
    "value", [[1, (2, 3)], {}, {1, 2}, torch.tensor([1.0]), bytearray(b"abc"), np.arange(3)]
)
def test_components_that_are_bare_values(value, tmp_path: Path, same) -> None:
    live = copy.deepcopy(value)
    if torch.is_tensor(live) or isinstance(live, np.ndarray):
        live[...] = 0
    else:
        live.clear()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": value})
        report = ckpt.load({"v": live})
    assert report.values["v"] is live
    same(live, value)


@pytest.mark.parametrize(
    "value",
    [5, True, 2.5, "text", b"bytes", None, (torch.ones(1), "a"), frozenset({1}), np.float32(1), 1j],
)
def test_bare_values_that_cannot_be_put_back_are_refused_at_the_save(
    value, tmp_path: Path, same
) -> None:
    for state in ({"w": {"a": 1}, "epoch": value}, [StateComponent("epoch", value)]):
        with (
            CheckpointManager(tmp_path) as ckpt,
            pytest.raises(InvalidState, match=r"'progress'.*Value\(") as caught,
        ):
            ckpt.save(1, state)
        assert caught.value.component == "epoch"
    assert list(tmp_path.iterdir()) == []
    # With a holder it comes back; an earlier version has saved the bare value just so.
    holder = Value(None)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"epoch": Value(value)})
        ckpt.load({"epoch": holder})
        report = ckpt.load({"epoch": value})
    same(holder.value, value)
    same(report.values["epoch"], value)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"a": 1}, [1]),
        ([1], {"a": 1}),
        ({1}, [1]),
        (torch.ones(2), {"a": 1}),
        (np.ones(2), np.ones(3)),
        (torch.ones(2), torch.ones(3)),
    ],
)
def test_a_whole_component_of_another_kind_is_refused(saved, live, tmp_path: Path) -> None:
    before = copy.deepcopy(live)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"v": saved})
        with pytest.raises(StateMismatch) as caught:
            ckpt.load({"v": live}, strict=False)
    assert list(caught.value.mismatched) == ["v/value"]
    assert (
        np.array_equal(before, live) if isinstance(live, np.ndarray) else str(before) == str(live)
    )
