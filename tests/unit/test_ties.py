"""B19: tensors that share memory are stored once, and share memory again where the live ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, StateMismatch, open_checkpoint


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CheckpointManager, torch.Tensor]:
    torch.manual_seed(1)
    net = Net(tied=True)
    ckpt = CheckpointManager(tmp_path)
    ckpt.save(1, {"model": net})
    return ckpt, net.emb.weight.detach().clone()


def test_b19_tied_tensors_are_stored_once(saved) -> None:
    ckpt, weight = saved
    view = open_checkpoint(f"{ckpt.root}/checkpoint-1")
    emb, head = view.tensors()
    assert (emb.name, emb.alias_of) == ("emb.weight", None)
    assert (head.name, head.alias_of) == ("head.weight", "emb.weight")
    assert view.manifest.components["model"].size_bytes == weight.numel() * 4
    assert view.read("model/head.weight").tolist() == weight.tolist()


@pytest.mark.parametrize("transactional", [False, True])
def test_b19_into_a_tied_model(saved, transactional: bool) -> None:
    ckpt, weight = saved
    live = Net(tied=True)
    address = live.emb.weight.data_ptr()
    ckpt.load({"model": live}, transactional=transactional)
    assert live.head.weight is live.emb.weight
    assert live.head.weight.data_ptr() == address
    assert torch.equal(live.emb.weight, weight)


@pytest.mark.parametrize("transactional", [False, True])
def test_b19_into_an_untied_model(saved, transactional: bool) -> None:
    ckpt, weight = saved
    live = Net(tied=False)
    ckpt.load({"model": live}, transactional=transactional)
    assert torch.equal(live.emb.weight, weight)
    assert torch.equal(live.head.weight, weight)
    assert live.emb.weight.data_ptr() != live.head.weight.data_ptr()
    assert live.head.weight.requires_grad


def test_b19_partly_overlapping_tensors_become_copies(tmp_path: Path) -> None:
    a = torch.arange(4.0)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"a": a, "b": a[:2], "c": a[1:3], "d": a.view(2, 2)}})
        plain = {
            "a": torch.zeros(4),
            "b": torch.zeros(2),
            "c": torch.zeros(2),
            "d": torch.zeros(2, 2),
        }
        ckpt.load({"c": plain})
        shared = torch.zeros(4)
        live = {"a": shared, "b": shared[:2], "c": shared[1:3], "d": shared.view(2, 2)}
        ckpt.load({"c": live})
    assert {k: v.flatten().tolist() for k, v in plain.items()} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [0.0, 1.0],
        "c": [1.0, 2.0],
        "d": [0.0, 1.0, 2.0, 3.0],
    }
    assert shared.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [t.alias_of for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()] == [None] * 4


def test_same_memory_of_other_dtype_is_no_tie(tmp_path: Path) -> None:
    a = torch.tensor([1.5, -2.0])
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(
            1,
            {
                "c": {
                    "a": a,
                    "raw": a.view(torch.int32),
                    "conj": torch.view_as_complex(a).conj().reshape(1),
                }
            },
        )
        live = {
            "a": torch.zeros(2),
            "raw": torch.zeros(2, dtype=torch.int32),
            "conj": torch.zeros(1, dtype=torch.complex64),
        }
        ckpt.load({"c": live})
    assert live["a"].tolist() == [1.5, -2.0]
    assert live["raw"].tolist() == a.view(torch.int32).tolist()
    assert live["conj"].tolist() == [1.5 + 2.0j]


def test_ties_that_are_not_live_yet_are_given_as_one_tensor(tmp_path: Path) -> None:
    class Slots:
        def __init__(self) -> None:
            self.state: dict = {}

        def state_dict(self) -> dict:
            return dict(self.state)

        def load_state_dict(self, state: dict) -> None:
            self.state = dict(state)

    full, fresh = Slots(), Slots()
    full.state["x"] = full.state["y"] = torch.tensor([3.0])
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"slots": full})
        ckpt.load({"slots": fresh})
    assert fresh.state["x"].tolist() == [3.0]
    assert fresh.state["x"].data_ptr() == fresh.state["y"].data_ptr()


def test_live_ties_take_equal_values(tmp_path: Path) -> None:
    untied = Net(tied=False)
    with torch.no_grad():
        untied.head.weight.copy_(untied.emb.weight)
    live = Net(tied=True)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": untied})
        ckpt.load({"model": live})
    assert live.head.weight is live.emb.weight
    assert torch.equal(live.emb.weight, untied.emb.weight)


@pytest.mark.parametrize("transactional", [False, True])
def test_live_ties_refuse_values_that_differ(transactional: bool, tmp_path: Path) -> None:
    # One memory cannot hold two values: whichever came last would be a wrong restore of the other.
    live = Net(tied=True)
    before = live.emb.weight.detach().clone()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": Net(tied=False)})
        with pytest.raises(StateMismatch, match=r"head\.weight"):
            ckpt.load({"model": live}, transactional=transactional)
    assert torch.equal(live.emb.weight, before)


def test_ties_between_components_are_kept_apart(tmp_path: Path) -> None:
    net = Net(tied=True)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": net, "copy": {"w": net.emb.weight.detach()}})
        live = Net(tied=True)
        copy = torch.zeros(5, 3)
        ckpt.load({"model": live, "copy": {"w": copy}})
    assert torch.equal(copy, net.emb.weight)
    assert torch.equal(live.emb.weight, net.emb.weight)


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_ties_that_were_others_refuse_values_that_differ(
    order: str, transactional: bool, tmp_path: Path
) -> None:
    """Saved a and b as one, c apart; live are b and c one, whichever of them comes first."""
    a, c = torch.ones(3), torch.full((3,), 5.0)
    made = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(3))}
    made["c"] = made["b"]
    live = nn.ParameterDict()
    for name in order:
        live[name] = made[name]
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"a": a, "b": a, "c": c}})
        with pytest.raises(
            StateMismatch, match=r"'m/[bc]' was saved as a value of its own.* shares with '[bc]'"
        ) as found:
            ckpt.load({"m": live}, transactional=transactional)
    # Named are those that are one now, not those that were.
    later, first = sorted("bc", key=order.index, reverse=True)
    assert found.value.mismatched == {
        f"m/{later}": ("a value of its own", f"memory that it shares with {first!r}")
    }
    assert [t.tolist() for t in live.values()] == [[0.0] * 3] * 3


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_ties_of_plain_values_that_were_none_end(
    order: str, transactional: bool, tmp_path: Path
) -> None:
    """In a dict each name has what was saved under it: another tensor can take the place of the one
    that was shared."""
    a, c = torch.ones(3), torch.full((3,), 5.0)
    live = {"a": torch.zeros(3), "b": torch.zeros(3)}
    live["c"] = live["b"]
    live = {name: live[name] for name in order}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"a": a, "b": a, "c": c}})
        ckpt.load({"m": live}, transactional=transactional)
    assert {name: t.tolist() for name, t in live.items()} == {
        "a": [1.0] * 3,
        "b": [1.0] * 3,
        "c": [5.0] * 3,
    }


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_ties_that_were_others_take_equal_values(
    order: str, transactional: bool, tmp_path: Path
) -> None:
    a, c = torch.full((3,), 5.0), torch.full((3,), 5.0)
    live = {"a": torch.zeros(3), "b": torch.zeros(3)}
    live["c"] = live["b"]
    live = {name: live[name] for name in order}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"a": a, "b": a, "c": c}})
        values = ckpt.load({"m": live}, transactional=transactional).values["m"]
    assert [t.tolist() for t in live.values()] == [[5.0] * 3] * 3
    assert all(values[name] is live[name] for name in "abc")
