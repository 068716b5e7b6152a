"""Loading a part: keys select by name, pattern or function, strict over what was asked for, and
nothing else changes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from glob import escape
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointCorrupt,
    CheckpointManager,
    InvalidState,
    RanksDisagree,
    StateMismatch,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed: int) -> dict:
    model = net(seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": seed / 10},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ]
    )
    for _ in range(2):
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, seed)
    counters = {
        "seen": seed,
        "per": {"a": seed, "b": torch.full((2,), float(seed))},
        "tail": [seed, seed],
    }
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counters": counters}


def moments(state: dict, name: str) -> torch.Tensor | None:
    parameter = dict(state["model"].named_parameters())[name]
    found = state["optimizer"].state.get(parameter)
    return None if not found else found["exp_avg"].clone()


@pytest.fixture
def ckpt(tmp_path: Path) -> CheckpointManager:
    manager = CheckpointManager(tmp_path)
    manager.save(5, trained(1))
    return manager


@pytest.mark.parametrize(
    "keys", ["model", "model/*", ["model/*"], lambda n: n.startswith("model/"), {"model"}]
)
def test_weights_alone(ckpt, keys, bits) -> None:
    state, saved = trained(2), trained(1)
    before = {n: moments(state, n) for n, _ in state["model"].named_parameters()}
    report = ckpt.load(state, keys=keys)
    assert (report.missing, report.unexpected) == ([], [])
    for name, value in saved["model"].state_dict().items():
        assert bits(state["model"].state_dict()[name]) == bits(value), name
    assert all(bits(moments(state, n)) == bits(m) for n, m in before.items())
    assert state["optimizer"].param_groups[0]["lr"] == 0.2 and state["scheduler"].step_size == 2
    assert state["counters"]["seen"] == 2


def test_a_layer_and_its_moments(ckpt, bits) -> None:
    state, saved, before = trained(2), trained(1), trained(2)
    ckpt.load(state, keys=["model/0.*", "optimizer/0.*"])
    for name, value in state["model"].state_dict().items():
        expected = saved if name.startswith("0.") else before
        assert bits(value) == bits(expected["model"].state_dict()[name]), name
    for name, _ in state["model"].named_parameters():
        expected = saved if name.startswith("0.") else before
        assert bits(moments(state, name)) == bits(moments(expected, name)), name
    # All parameters of the first group were taken, and so were its options; none of the other
    # group's.
    assert [group["lr"] for group in state["optimizer"].param_groups] == [0.1, 0.001]
    ckpt.load(state2 := trained(3), keys="optimizer/0.weight")
    assert state2["optimizer"].param_groups[0]["lr"] == 3 / 10
    assert bits(moments(state2, "0.weight")) == bits(moments(saved, "0.weight"))
    assert bits(moments(state2, "0.bias")) == bits(moments(trained(3), "0.bias"))


def test_moments_into_an_optimizer_that_has_none(ckpt, bits) -> None:
    model = net(4)
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ]
    )
    state = {"model": model, "optimizer": optimizer}
    ckpt.load(state, keys="optimizer/2.*")
    assert bits(moments(state, "2.weight")) == bits(moments(trained(1), "2.weight"))
    assert moments(state, "0.weight") is None


def test_plain_values_and_objects(ckpt) -> None:
    state = trained(2)
    report = ckpt.load(state, keys=["counters/per", "scheduler/step_size"])
    assert state["counters"]["per"]["b"].tolist() == [1.0, 1.0]
    assert report.values["counters"]["per"]["a"] == 1
    assert (report.values["counters"]["seen"], report.values["counters"]["tail"]) == (2, [2, 2])
    assert state["scheduler"].step_size == 1
    assert state["scheduler"].base_lrs == [0.2, 0.001]


def test_a_function_renames(ckpt, bits) -> None:
    """Called with each live name; what it returns is where that is read from, in another component,
    too."""
    asked = []

    def keys(name: str) -> bool | str | None:
        asked.append(name)
        kind, _, rest = name.partition("/")
        if kind == "teacher":
            return f"model/{rest}" if not rest.startswith("1.") else None
        return {"notes/first": "counters/per/a", "notes/all": "counters/per"}.get(name, False)

    state = {"teacher": net(7), "notes": {"first": 0, "all": None, "own": 9}}
    report = ckpt.load(state, keys=keys)
    assert sorted(asked) == sorted(
        [f"teacher/{n}" for n in net(7).state_dict()] + ["notes/first", "notes/all", "notes/own"]
    )
    for name, value in state["teacher"].state_dict().items():
        assert bits(value) == bits(
            (net(7) if name.startswith("1.") else trained(1)["model"]).state_dict()[name]
        ), name
    notes = report.values["notes"]
    assert (notes["first"], notes["all"]["a"], notes["all"]["b"].tolist(), notes["own"]) == (
        1,
        1,
        [1.0, 1.0],
        9,
    )


def test_one_saved_name_for_several(ckpt, bits) -> None:
    state = {"heads": {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}}
    ckpt.load(state, keys=lambda n: "counters/per/b" if n != "heads/c" else None)
    assert [t.tolist() for t in state["heads"].values()] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert state["heads"]["a"].data_ptr() != state["heads"]["b"].data_ptr()


def test_moments_of_renamed_parameters(ckpt, bits) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(8)

    model = Wrapped()
    parts = [
        [*model.body[0].parameters()],
        [*model.body[1].parameters(), *model.body[2].parameters()],
    ]
    state = {"model": model, "optimizer": torch.optim.AdamW([{"params": part} for part in parts])}
    torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
    with pytest.raises(StateMismatch):
        ckpt.load(state, keys=["model", "optimizer"])
    ckpt.load(state, keys=lambda n: n.replace("/body.", "/"))
    saved = trained(1)
    for name, parameter in model.named_parameters():
        assert bits(parameter) == bits(saved["model"].state_dict()[name.removeprefix("body.")])
        assert bits(state["optimizer"].state[parameter]["exp_avg"]) == bits(
            moments(saved, name.removeprefix("body."))
        )
    assert state["optimizer"].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("transactional", [False, True])
def test_strict_over_what_is_asked_for(ckpt, transactional: bool) -> None:
    def attempt(state: dict, keys, **how) -> StateMismatch:
        before = {n: t.clone() for n, t in state["model"].state_dict().items()}
        with pytest.raises(StateMismatch) as caught:
            ckpt.load(state, keys=keys, transactional=transactional, **how)
        assert all(torch.equal(t, before[n]) for n, t in state["model"].state_dict().items())
        return caught.value

    wide = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
    error = attempt({"model": wide}, "model/*")
    assert (error.missing, error.unexpected) == (["model/3.weight", "model/3.bias"], [])
    assert ckpt.load({"model": wide}, keys="model/[0-2].*").missing == []
    assert ckpt.load({"model": wide}, keys="model/*", strict=False).missing == [
        "model/3.weight",
        "model/3.bias",
    ]
    narrow = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    error = attempt({"model": narrow}, "model/*")
    assert (error.missing, error.unexpected) == ([], ["model/2.weight", "model/2.bias"])
    assert ckpt.load({"model": narrow}, keys=["model/0.*", "model/1.*"]).unexpected == []
    assert ckpt.load({"model": narrow}, keys=lambda name: True).unexpected == []
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    error = attempt({"model": other}, ["model/0.weight", "model/2.*"])
    assert error.mismatched == {"model/0.weight": ("F32 [4, 3]", "F32 [5, 3]")}
    assert ckpt.load({"model": other}, keys="model/2.*").step == 5
    halved = net(3).double()
    attempt({"model": halved}, "model/0.*")
    report = ckpt.load({"model": halved}, keys="model/0.*", cast=True)
    assert report.cast == {"model/0.weight": "F32 -> F64", "model/0.bias": "F32 -> F64"}


@pytest.mark.parametrize("keys", ["modle/*", ["model/*", "modle"], lambda name: None, "model/9.*"])
def test_what_asks_for_nothing_is_an_error(ckpt, keys) -> None:
    with pytest.raises(StateMismatch, match="asks for nothing that the live state has"):
        ckpt.load({"model": net(2)}, keys=keys)
    with pytest.raises(StateMismatch):
        ckpt.load({"model": net(2)}, keys=lambda name: f"nowhere/{name}", strict=False)


@pytest.mark.parametrize(
    "keys", [[], "", 5, [5], b"model", lambda name: 1, lambda name: "model", lambda name: {}[name]]
)
def test_what_is_no_selection(ckpt, keys, tmp_path) -> None:
    with pytest.raises(InvalidState, match="keys"):
        ckpt.load({"model": net(2)}, keys=keys)
    if not callable(keys):  # what a function gives is known when it is called
        with pytest.raises(InvalidState, match="keys"):
            CheckpointManager(tmp_path / "fresh").restore({"model": net(2)}, keys=keys)


def test_components_that_were_not_given(ckpt) -> None:
    """A load is strict within what it is given; a restore minds a component that was forgotten,
    unless keys leave it out."""
    assert ckpt.load({"model": net(2)}).unexpected == ["counters", "optimizer", "scheduler"]
    folder = f"{ckpt.root}/checkpoint-5"
    assert CheckpointCoordinator({"model": net(2)}).load_checkpoint(folder).step == 5
    assert (
        CheckpointCoordinator({"model": net(2)})
        .load_checkpoint(folder, keys="model/0.*")
        .unexpected
        == []
    )
    for which in ("auto", 5):
        with pytest.raises(StateMismatch) as caught:
            ckpt.restore({"model": net(2)}, which)
        assert caught.value.unexpected == ["counters", "optimizer", "scheduler"]
        assert ckpt.restore({"model": net(2)}, which, keys="model").unexpected == []
        with pytest.raises(StateMismatch) as caught:
            ckpt.restore({"model": net(2)}, which, keys=["model", "*e*"])
        assert caught.value.unexpected == ["counters", "optimizer", "scheduler"]
        with pytest.raises(
            StateMismatch, match=r"'optim[*]' asks for nothing that the live state has"
        ):
            ckpt.restore({"model": net(2)}, which, keys=["model", "optim*"])


def test_errors_name_what_was_saved(ckpt) -> None:
    """Of what is read under another name: the name that the checkpoint lacks, and the tensor that
    is damaged there."""
    with pytest.raises(
        StateMismatch, match=r"nothing that keys ask for .* not 'model/9\.weight'"
    ) as caught:
        ckpt.load({"teacher": {"w": torch.zeros(4, 3)}}, keys=lambda name: "model/9.weight")
    assert caught.value.missing == ["teacher/w"]
    with pytest.raises(
        StateMismatch, match=r"missing in the checkpoint: 'model/9\.weight';"
    ) as caught:
        names = {"teacher/w": "model/9.weight", "teacher/b": "model/0.bias"}
        ckpt.load({"teacher": {"w": torch.zeros(4, 3), "b": torch.zeros(4)}}, keys=names.get)
    assert caught.value.missing == ["teacher/w"]
    file = Path(ckpt.root, "checkpoint-5", "model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    last = open_checkpoint(f"{ckpt.root}/checkpoint-5").tensors()
    names = [info.full_name for info in last if info.component == "model" and info.dtype == "F32"]
    damaged = []
    for name in names:
        shape = next(info.shape for info in last if info.full_name == name)
        try:
            ckpt.load({"teacher": {"w": torch.zeros(shape)}}, keys=lambda _, name=name: name)
        except CheckpointCorrupt as error:
            damaged.append((error.tensor, error.file))
            assert error.tensor == name
    assert len(damaged) == 1 and damaged[0][1] == "model.safetensors"


def test_tied_weights(tmp_path, bits) -> None:
    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(4, 3),
                "body": nn.Linear(3, 3),
                "head": nn.Linear(3, 4, bias=False),
            }
        )
        model["head"].weight = model["embed"].weight
        return model

    ckpt = CheckpointManager(tmp_path)
    ckpt.save(1, {"model": tied(1)})
    for keys in ("model/head.*", "model/embed.*", ["model/head.*", "model/embed.*"]):
        model = tied(2)
        ckpt.load({"model": model}, keys=keys)
        assert bits(model["head"].weight) == bits(tied(1)["head"].weight)
        assert model["head"].weight is model["embed"].weight
        assert bits(model["body"].weight) == bits(tied(2)["body"].weight)
    untied = tied(3)
    untied["head"].weight = nn.Parameter(torch.zeros(4, 3))
    ckpt.load({"model": untied}, keys="model/head.*")
    assert bits(untied["head"].weight) == bits(tied(1)["head"].weight)
    assert bits(untied["embed"].weight) == bits(tied(3)["embed"].weight)


def test_a_state_that_grew_comes_whole(tmp_path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.state: dict = {}

        def state_dict(self) -> dict:
            return dict(self.state)

        def load_state_dict(self, state: dict) -> None:
            self.state = state

    ckpt = CheckpointManager(tmp_path)
    grown = Loader()
    grown.state = {"worker": {"at": 3}, "extra": [1]}
    ckpt.save(1, {"loader": grown, "model": net(1)})
    for keys in ("loader", "loader/*", lambda name: name.startswith("loader")):
        fresh = Loader()
        ckpt.load({"loader": fresh, "model": net(1)}, keys=keys)
        assert fresh.state == grown.state
    some = Loader()
    some.state = {"worker": {"at": 0}, "own": 5}
    ckpt.load({"loader": some}, keys="loader/worker/*")
    assert some.state == {"worker": {"at": 3}, "own": 5}


KEYS = st.one_of(st.sampled_from(["a", "b", "a/b", "x~y", "*"]), st.integers(0, 2))
LEAVES = st.sampled_from(["tensor", "value", "list"])
TREES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def filled(tree, number: float, kind=dict):
    if isinstance(tree, dict):
        return kind(
            {key: filled(item, number + n / 10, kind) for n, (key, item) in enumerate(tree.items())}
        )
    return {
        "tensor": torch.full((3,), number),
        "value": number,
        "list": [number, torch.tensor(number)],
    }[tree]


def leaves(state, path=()):
    if isinstance(state, dict):
        for key, item in state.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, state


@given(
    tree=TREES,
    chosen=st.sets(st.integers(0, 7)),
    kind=st.sampled_from([dict, OrderedDict]),
    reverse=st.booleans(),
)
def test_any_names_of_any_nested_state(tmp_path_factory, tree, chosen, kind, reverse, same) -> None:
    """What a function takes is as it was saved, to the bit; everything else is as it was; also the
    other way around."""
    ckpt = CheckpointManager(tmp_path_factory.mktemp("root"))
    saved, live, before = filled(tree, 1.0, kind), filled(tree, 2.0, kind), filled(tree, 2.0, kind)
    ckpt.save(1, {"c": saved})
    names: list[str] = []
    ckpt.load({"c": filled(tree, 0.0, kind)}, keys=lambda name: names.append(name) or True)
    assert len(set(names)) == len(names) == len(list(leaves(saved)))
    wanted = {name for n, name in enumerate(names) if (n in chosen) != reverse}
    if not wanted:
        with pytest.raises(StateMismatch):
            ckpt.load({"c": live}, keys=lambda name: name in wanted)
        return
    report = ckpt.load(
        {"c": live},
        keys=(lambda name: name in wanted) if reverse else [*map(escape, sorted(wanted))],
    )
    loaded = dict(leaves(report.values["c"]))
    for name, (path, old), (_, new) in zip(
        names, leaves(before), leaves(filled(tree, 1.0, kind)), strict=True
    ):
        same(loaded[path], new if name in wanted else old, name)
    # Tensors that are leaves of dicts are restored in place.
    for path, leaf in leaves(live):
        if torch.is_tensor(leaf):
            same(leaf, loaded[path])


def test_counters_keep_their_type(tmp_path) -> None:
    ckpt = CheckpointManager(tmp_path)
    ckpt.save(1, {"c": Counter(a=1, b=2)})
    report = ckpt.load({"c": Counter(a=5, b=7)}, keys="c/b")
    assert report.values["c"] == Counter(a=5, b=2) and type(report.values["c"]) is Counter


def test_ranks_must_ask_for_the_same(tmp_path) -> None:
    def program(comm, keys_of):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            state = {"a": {"x": torch.zeros(2), "y": torch.zeros(2)}}
            try:
                ckpt.load(state, keys=keys_of(comm.rank))
            except RanksDisagree as error:
                assert not state["a"]["x"].any()
                return error.ranks
            return state["a"]["x"].tolist(), state["a"]["y"].tolist()

    CheckpointManager(tmp_path).save(1, {"a": {"x": torch.ones(2), "y": torch.ones(2)}})
    for keys_of in (
        lambda rank: ["a/x", "a/y"][rank],
        lambda rank: [None, "a"][rank],
        lambda rank: [lambda name: True, "a"][rank],
        lambda rank: lambda name: name.endswith("xy"[rank]),
        lambda rank: lambda name: name if rank else "a/x",
    ):
        assert run_ranks(2, lambda comm, f=keys_of: program(comm, f)) == [[1], [1]]
    assert (
        run_ranks(2, lambda comm: program(comm, lambda rank: lambda name: name == "a/y"))
        == [([0.0] * 2, [1.0] * 2)] * 2
    )
