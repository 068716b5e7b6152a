"""What people write first, from the documents: providers, components in dicts, groups, single
checkpoints, names."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    ModelState,
    OptimizerState,
    ReplicationMismatch,
    RNGState,
    Shard,
    SharingPattern,
    StateComponent,
    StatefulProvider,
    StateMismatch,
    UnknownName,
    delete_checkpoint,
    export_checkpoint,
    import_checkpoint,
    open_checkpoint,
    pin_checkpoint,
    register_tensor_class,
    unpin_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


class Provider:
    """All that a trainer of before had."""

    def __init__(
        self, value: float = 1.0, pattern: str = "GLOBAL", group: str | None = None
    ) -> None:
        self.part = StateComponent("m", {"a": torch.tensor([value])}, pattern, group)

    def get_state_components(self) -> list[StateComponent]:
        return [self.part]


def test_a_provider_needs_no_process_groups(tmp_path: Path) -> None:
    assert isinstance(Provider(), StatefulProvider)
    CheckpointManager(tmp_path).save(1, Provider(3.0))
    live = Provider(0.0)
    assert CheckpointManager(tmp_path).restore(live).step == 1
    assert live.part.stateful["a"].item() == 3.0
    with pytest.raises(InvalidState, match="Provider"):
        CheckpointManager(tmp_path).save(2, Provider)  # the class


def test_a_provider_may_have_process_groups(tmp_path: Path) -> None:
    class WithGroups(Provider):
        def get_process_groups(self) -> dict[str, Any]:
            return {"dp": [[0, 1]]}

    def program(comm: Any) -> Any:
        CheckpointManager(tmp_path, comm=comm).save(1, Provider(1.0))
        info = CheckpointCoordinator(WithGroups(2.0, "per_group", "dp"), comm=comm).save_checkpoint(
            tmp_path / "one"
        )
        return info.manifest.groups

    assert run_ranks(2, program) == [{"dp": [[0, 1]]}] * 2


def test_a_component_in_a_dict(tmp_path: Path) -> None:
    """Its key is the dict's, and what it does not say is what the dict's other values get."""

    def program(comm: Any) -> Any:
        rows = torch.arange(2.0)[comm.rank : comm.rank + 1]
        state = {
            "plain": {"x": torch.ones(1)},
            "said": StateComponent("said", {"x": torch.tensor([comm.rank])}, "per_rank"),
            "same": StateComponent("same", {"x": torch.ones(1)}, required=False),
            "rng": StateComponent("rng", RNGState(), on_resize="keep"),
            "rows": StateComponent("rows", {"x": Shard(rows, (2,), (comm.rank,))}),
        }
        return CheckpointManager(tmp_path, comm=comm).save(1, state).manifest.components

    parts = run_ranks(2, program)[0]
    assert {key: c.pattern for key, c in parts.items()} == {
        "plain": "REPLICATED",
        "said": "PER_RANK",
        "same": "REPLICATED",
        "rng": "PER_RANK",
        "rows": "SHARDED",
    }
    assert [key for key, c in parts.items() if not c.required] == ["same"]
    assert StateComponent("a", 1).sharing_pattern is SharingPattern.GLOBAL
    with pytest.raises(InvalidState, match=r"'model'.*'net'"):
        CheckpointManager(tmp_path).save(2, {"model": StateComponent("net", {"x": 1})})


def test_a_list_with_one_wrong_item_names_it(tmp_path: Path) -> None:
    good = StateComponent("a", {"x": 1})
    with pytest.raises(InvalidState, match=r"item 1 of 3 .*Linear"):
        CheckpointManager(tmp_path).save(1, [good, nn.Linear(1, 1), good])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("group", "shown"),
    [
        ([0, 1], r"\[\[0, 1\], \.\.\.\]"),
        ("dp", "str"),
        ([["a"]], "list"),
        (5, "int"),
        ((None, "dp"), "dimension 'dp'"),
        ([[0.5, 1]], "list"),
        (["ab"], "list"),
    ],
)
def test_a_group_in_a_wrong_form_shows_the_right_one(
    group: Any, shown: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidState, match=shown):
        CheckpointManager(tmp_path, process_groups={"dp": group}).save(1, {"a": {"x": 1}})
    assert list(tmp_path.iterdir()) == []


def test_groups_of_numpy_ranks(tmp_path: Path) -> None:
    info = CheckpointManager(tmp_path, process_groups={"dp": [[np.int64(0)]]}).save(
        1, {"a": {"x": 1}}
    )
    assert info.manifest.groups == {"dp": [[0]]}


def test_the_step_of_a_single_checkpoint_is_that_of_its_folder(tmp_path: Path) -> None:
    state = {"m": {"a": torch.ones(1)}}
    for name, step in {"checkpoint-7": 7, "one": 0, "checkpoint-07": 0}.items():
        assert CheckpointCoordinator(state).save_checkpoint(tmp_path / name).step == step
    assert CheckpointCoordinator(state).save_checkpoint(tmp_path / "checkpoint-8", step=3).step == 3


def test_single_checkpoints_of_one_run(tmp_path: Path) -> None:
    for step in (2, 7):
        state = {"m": {"a": torch.tensor([float(step)])}}
        CheckpointCoordinator(state).save_checkpoint(tmp_path / f"checkpoint-{step}", run_id="mine")
    with CheckpointManager(tmp_path) as ckpt:
        assert [(i.step, i.run_id) for i in ckpt.list()] == [(2, "mine"), (7, "mine")]
        live = {"m": {"a": torch.zeros(1)}}
        assert ckpt.load(live, 2).step == 2
        assert live["m"]["a"].item() == 2.0


def test_the_id_of_a_single_checkpoint(tmp_path: Path) -> None:
    state = {"m": {"a": torch.ones(1)}}
    info = CheckpointCoordinator(state).save_checkpoint(tmp_path / "a", "my.id-1")
    assert (
        info.manifest.checkpoint_id
        == open_checkpoint(tmp_path / "a").manifest.checkpoint_id
        == "my.id-1"
    )
    for wrong in ("", "a b", "x" * 65, 5, "../x"):
        with pytest.raises(InvalidState, match="checkpoint_id"):
            CheckpointCoordinator(state).save_checkpoint(tmp_path / "b", wrong)
    assert not (tmp_path / "b").exists()


def test_whether_one_save_compares_the_replicas(tmp_path: Path) -> None:
    """A difference that only a look at every byte finds: QUICK, the default, samples."""

    def program(comm: Any) -> Any:
        values = torch.zeros(1_000_000)
        values[123_456] = comm.rank
        tensors = {"w": values, "n": torch.ones(1)}
        coordinator = CheckpointCoordinator([StateComponent("m", tensors, "replicated")], comm=comm)
        found: dict[str, Any] = {}
        for name, validate in {
            "no": False,
            "yes": True,
            "level": "tensor",
            "wrong": "all",
            "one": 1,
        }.items():
            try:
                found[name] = coordinator.save_checkpoint(tmp_path / name, validate=validate).status
            except CheckpointError as error:
                found[name] = type(error)
        tensors["n"].fill_(comm.rank)
        for name, validate in {"no2": False, "yes2": True}.items():
            try:
                found[name] = coordinator.save_checkpoint(tmp_path / name, validate=validate).status
            except CheckpointError as error:
                found[name] = type(error)
        return found

    assert (
        run_ranks(2, program)
        == [
            {
                "no": "committed",
                "yes": "committed",
                "level": ReplicationMismatch,
                "wrong": InvalidState,
                "one": InvalidState,
                "no2": "committed",
                "yes2": ReplicationMismatch,
            }
        ]
        * 2
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "call",
    ["path", "step", "run_id", "checkpoint_id", "validate", "metadata", "load path", "strict"],
)
def test_a_wrong_argument_on_one_rank_of_a_single_checkpoint(
    call: str, rank: int, tmp_path: Path
) -> None:
    def program(comm: Any) -> str:
        coordinator = CheckpointCoordinator({"m": {"a": torch.ones(1)}}, comm=comm)
        save: dict[str, Any] = {"path": tmp_path / "a"}
        load: dict[str, Any] = {"path": tmp_path / "a"}
        wrong = comm.rank == rank
        if wrong and call in ("load path", "strict"):
            load |= {"path": ""} if call == "load path" else {"strict": 1}
        elif wrong:
            save |= {call: 1.5}
        with pytest.raises(InvalidState) as caught:
            (
                coordinator.load_checkpoint
                if call in ("load path", "strict")
                else coordinator.save_checkpoint
            )(**(load if call in ("load path", "strict") else save))
        return str(caught.value)

    texts = run_ranks(2, program, deadline=20.0)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank {rank}: ")
    assert list(tmp_path.iterdir()) == []


def test_loading_a_root_names_the_checkpoints_in_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, {"m": {"a": torch.ones(1)}})
    state = {"m": {"a": torch.zeros(1)}}
    for call in (
        lambda: CheckpointCoordinator(state).load_checkpoint(tmp_path),
        lambda: open_checkpoint(tmp_path),
        lambda: CheckpointManager(tmp_path / "other").load(state, tmp_path),
    ):
        with pytest.raises(
            CheckpointNotFound,
            match=r"it is a root with \.\.\., checkpoint-3, .*, checkpoint-7: say which",
        ):
            call()
    with pytest.raises(CheckpointNotFound) as caught:
        open_checkpoint(tmp_path / "checkpoint-9")
    assert "root with" not in str(caught.value)


def test_names_that_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, {"model": {"weight": torch.ones(2), "n": 1}})
    view = open_checkpoint(tmp_path / "checkpoint-1")
    for call in (
        lambda: view.values("nosuch"),
        lambda: view.read("model/weigth"),
        lambda: view.values(None),
    ):
        with pytest.raises(KeyError) as caught:
            call()
        assert isinstance(caught.value, UnknownName)
    with pytest.raises(UnknownName, match="did you mean 'model/weight'"):
        view.read("model/weigth")
    with pytest.raises(UnknownName, match="it has model") as caught:
        view.values("nosuch")
    assert caught.value.available == ["model"]
    with pytest.raises(IndexError, match="copies 0 to 0"):
        view.values("model", 1)
    for number in (-1, 1.0, "0"):
        with pytest.raises(InvalidState):
            view.values("model", number)
    with pytest.raises(InvalidState, match="one slice"):
        view.read("model/weight", [slice(0, 1), slice(0, 1)])


def test_across_which_ranks_state_was_replicated(tmp_path: Path) -> None:
    def program(comm: Any) -> Any:
        groups = {"dp": [[0, 2], [1, 3]]}
        state = [
            StateComponent(
                p.value.lower(),
                {"x": torch.ones(1)},
                p,
                "dp" if p is SharingPattern.PER_GROUP else None,
            )
            for p in SharingPattern
            if p is not SharingPattern.SHARDED
        ]
        return CheckpointManager(tmp_path, comm=comm, process_groups=groups).save(1, state).manifest

    saved = run_ranks(4, program)[0]
    read = open_checkpoint(tmp_path / "checkpoint-1").manifest
    for manifest in (saved, read):
        across = {
            key: [list(g) for g in c.replicated_across] for key, c in manifest.components.items()
        }
        assert across == {
            "global": [],
            "replicated": [[0, 1, 2, 3]],
            "per_rank": [],
            "per_group": [[0, 2], [1, 3]],
            "per_node": [],
        }
    assert (
        b"replicated_across"
        not in (tmp_path / "checkpoint-1" / "checkpoint_manifest.json").read_bytes()
    )


def test_a_restore_may_do_without_what_was_saved_as_not_required(tmp_path: Path) -> None:
    weights, cache = {"w": torch.ones(1)}, {"x": torch.ones(1)}
    for required in (False, True):
        root = tmp_path / str(required)
        CheckpointManager(root).save(
            1, [StateComponent("model", weights), StateComponent("cache", cache, required=required)]
        )
        live = {"w": torch.zeros(1)}
        if required:
            with pytest.raises(StateMismatch, match="'cache'"):
                CheckpointManager(root).restore([StateComponent("model", live)])
        else:
            report = CheckpointManager(root).restore([StateComponent("model", live)])
            assert report.unexpected == ["cache"]
        assert live["w"].item() == (0.0 if required else 1.0)


@pytest.mark.parametrize("path", [None, 1, b"checkpoint-1", ["checkpoint-1"], ""])
def test_a_path_is_text_for_every_function(tmp_path: Path, path: Any) -> None:
    CheckpointManager(tmp_path).save(1, {"m": {"a": torch.ones(1)}})
    calls: list[tuple[str, Any]] = [
        ("url", lambda: delete_checkpoint(path)),
        ("url", lambda: pin_checkpoint(path)),
        ("url", lambda: unpin_checkpoint(path)),
        ("source", lambda: import_checkpoint(path, tmp_path)),
        ("root", lambda: import_checkpoint(tmp_path, path)),
        ("folder", lambda: export_checkpoint(tmp_path / "checkpoint-1", path)),
    ]
    for name, call in calls:
        with pytest.raises(InvalidState, match=rf"^{name} (must be a path or a URL|is empty)"):
            call()
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_belongs_to_its_process(tmp_path: Path, how: Any) -> None:
    """As a data set that holds one finds out when its workers are spawned."""
    single = CheckpointCoordinator({"m": {"a": torch.ones(1)}})
    with CheckpointManager(tmp_path) as ckpt:
        for made in (ckpt, single):
            with pytest.raises(InvalidState) as refused:
                how([made] if how is not copy.copy else made)
            assert str(refused.value) == (
                f"a {type(made).__name__} cannot be pickled or copied: its threads and connections "
                "are those of this process; make one in each process"
            )
        assert ckpt.save(1, {"m": {"a": torch.ones(1)}}).step == 1


def test_what_is_no_model_and_no_optimizer_is_refused_by_name() -> None:
    linear = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(linear.parameters())
    refused: list[tuple[Any, str]] = [
        (lambda: ModelState(None), "a list or dict of modules, not None"),
        (lambda: ModelState(nn.Linear), "a list or dict of modules, not <class"),
        (lambda: ModelState({"a": linear, "b": [1]}), "a list or dict of modules, not 1"),
        (lambda: OptimizerState(None, linear), "a list of them, not None"),
        (lambda: OptimizerState([optimizer, linear], linear), "a list of them, not Linear"),
        (lambda: OptimizerState(optimizer, 1), "a dict of tensors by name, not 1"),
    ]
    for call, says in refused:
        with pytest.raises(InvalidState, match=says):
            call()
    with pytest.raises(TypeError, match="takes a class or its name, not 1"):
        register_tensor_class(1)  # type: ignore[arg-type]
    assert OptimizerState([optimizer], [linear]).optimizer == [optimizer]
    assert ModelState({"a": [linear], "b": linear}).prefixed == [("a.", linear), ("b.", linear)]
