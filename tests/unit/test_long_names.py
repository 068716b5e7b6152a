"""Names within the documented limits always fit: in one file or in several, on every storage."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptcore import CheckpointManager, SharingPattern, StateComponent, scan_root
from ckptcore.format.manifest import check_file_name
from ckptcore.saving.plan import TensorSpec, plan_component
from ckptcore.testing import run_ranks

keys = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Cf"], exclude_characters="/"),
    min_size=1,
    max_size=20,
)
labels = st.from_regex(r"\.[A-Za-z0-9_.-]{1,64}-[A-Za-z0-9_.-]{1,64}", fullmatch=True)


@given(keys, st.integers(1, 20), labels, labels, st.integers(1, 3))
@example("é", 40, "." + "g" * 64 + "-" + "x" * 64, "." + "g" * 64 + "-" + "x" * 63 + "y", 2)
@example("k", 80, "." + "g" * 64 + "-" + "x" * 64, "." + "g" * 64 + "-" + "x" * 63 + "y", 2)
def test_every_name_fits_and_copies_stay_apart(key, times, label, other, files):
    key = (key * times).encode()[:80].decode(errors="ignore")
    tensors = [TensorSpec(n, f"t{n}", "F32", (4,), 16) for n in range(files)]
    names = [
        plan.name
        for name in {label, other}
        for plan in plan_component(key, tensors, [0], name, max_file_bytes=16)
    ]
    assert all(check_file_name(name) == name for name in names)
    assert len(set(names)) == len(names) == files * len({label, other})
    if files > 1:
        check_file_name(names[0].rsplit("-", 3)[0] + ".safetensors.index.json")


def test_names_that_fit_are_as_they_were():
    tensors = [TensorSpec(n, f"t{n}", "F32", (4,), 16) for n in range(2)]
    names = [
        plan.name for plan in plan_component("model", tensors, [0], ".dp-00001", max_file_bytes=16)
    ]
    assert names == [
        "model.dp-00001-00001-of-00002.safetensors",
        "model.dp-00001-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_longest_ones_are_saved_in_several_files_and_loaded(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 64)
    root = str(tmp_path) if kind == "local" else f"memory://long-{tmp_path.name}"
    state = {"w": torch.arange(64.0), "v": torch.arange(64.0) * 2}

    class Part:
        def __init__(self, held):
            self.held = held

        def state_dict(self):
            return self.held

        def load_state_dict(self, held):
            self.held = held

    def program(comm):
        part = Part({name: tensor.clone() for name, tensor in state.items()})
        component = StateComponent(
            "é" * 40,
            part,
            SharingPattern.PER_GROUP,
            process_group_name="g" * 64,
            group_key="x" * 64,
        )
        with CheckpointManager(root, comm=comm, process_groups={"g" * 64: [[0, 1]]}) as ckpt:
            info = ckpt.save(1, [component])
            part.held = {name: torch.zeros(64) for name in state}
            ckpt.load([component], 1)
        return len(
            [name for name in info.manifest.files if name.endswith(".safetensors")]
        ), part.held

    for files, held in run_ranks(2, program):
        assert files == 2
        assert all(torch.equal(held[name], state[name]) for name in state)
    assert [info.status for info in scan_root(root)] == ["committed"]
