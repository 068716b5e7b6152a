"""Plain values too large for an index: stored as tensors, or refused before a byte is written;
never committed unread."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    KeepLast,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    UnsupportedValue,
    open_checkpoint,
)
from ckptcore.format.manifest import SIZE_LIMIT
from ckptcore.testing.ranks import run_ranks

SMALL = 16


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and bytes of SMALL bytes and more count as large."""
    monkeypatch.setattr("ckptcore.format.values.LARGE_BYTES", SMALL)


class Holder:
    """Takes what was saved, whatever it had before."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


LONG = b"\x00\xff" * SMALL
TEXT = "wide \u00e4\ud800" * SMALL
VALUES = {
    "bytes": LONG,
    "text": TEXT,
    "many": [bytes([n]) * SMALL for n in range(20)],
    "one of many": [LONG] * 20,
    "deep": {"a": [{"b": (LONG, {3: TEXT}, OrderedDict(c=deque([LONG], 3)))}], "n": 3},
    "bytearray": bytearray(LONG),
    "keys and sets": {LONG: 1, "s": {LONG, b"x"}, "f": frozenset([TEXT]), (LONG, 1): 2},
    "with tensors": {"w": torch.arange(6.0), "frame": LONG, "v": torch.ones(2)},
    "one size of each": [LONG[:SMALL], LONG[: SMALL - 1], TEXT[:SMALL], ""],
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_large_values_come_back_as_they_were(
    kind: str, how: str, small_limit: None, tmp_path: Path, same
) -> None:
    live = Holder(None)
    with CheckpointManager(tmp_path) as ckpt:
        if how == "save":
            ckpt.save(1, {"data": Holder(VALUES[kind])})
        else:
            ckpt.save_async(1, {"data": Holder(VALUES[kind])}).result()
        assert ckpt.verify() == []
        ckpt.load({"data": live})
    same(live.value, VALUES[kind])


@given(data=st.data())
def test_any_text_and_bytes_around_the_limit(data: Any, tmp_path_factory, same) -> None:
    from ckptcore.format import values

    sizes = st.integers(0, 3 * SMALL)
    leaf = sizes.flatmap(lambda n: st.binary(min_size=n, max_size=n)) | st.text(max_size=2 * SMALL)
    drawn = data.draw(
        st.recursive(
            leaf,
            lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=2), x, max_size=3),
        )
    )
    live = Holder(data.draw(st.sampled_from([None, drawn, [], {}])))
    before, values.LARGE_BYTES = values.LARGE_BYTES, SMALL
    try:
        with CheckpointManager(tmp_path_factory.mktemp("run")) as ckpt:
            ckpt.save(1, {"data": Holder(drawn)})
            ckpt.load({"data": live})
    finally:
        values.LARGE_BYTES = before
    same(live.value, drawn)


def test_live_values_of_another_size_do_not_matter_and_are_not_written_into(
    small_limit: None, tmp_path: Path
) -> None:
    """bytes cannot be changed in place, and what the live state has of them says nothing about
    where the saved ones go."""
    frame = bytes(SMALL)
    live = {"frame": frame, "other": b"x" * 100, "w": torch.zeros(2)}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"data": {"frame": LONG, "other": b"y" * 20, "w": torch.ones(2)}})
        report = ckpt.load({"data": live})
    assert frame == bytes(SMALL) and live["w"].tolist() == [1.0, 1.0]
    assert (report.values["data"]["frame"], report.values["data"]["other"]) == (LONG, b"y" * 20)


def test_what_is_large_lies_in_tensor_files_once(tmp_path: Path) -> None:
    frame = bytes(range(256)) * 256
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, {"data": {"frames": [frame] * 65, "short": frame[:-1]}})
        (path,) = (tmp_path / "checkpoint-1").glob("data*.safetensors")
        index = info.manifest.files["index.rank00000.msgpack"]
    assert len(frame) <= path.stat().st_size <= len(frame) + 4096
    assert index.size < len(frame) + 16384
    view = open_checkpoint(info.url)
    assert view.read("data/frames/64").tobytes() == frame
    assert view.verify() == []


def saved_by(tmp_path: Path, pattern: SharingPattern, value_of: Any, **declared: Any) -> list[Any]:
    def program(comm: Any) -> Any:
        component = StateComponent("data", Holder(value_of(comm.rank)), pattern, **declared)
        live = Holder({"a": b"", "n": -1})  # of SHARDED state a rank gets what it has a name for
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [component])
            ckpt.load([StateComponent("data", live, pattern, **declared)])
        return live.value

    return run_ranks(3, program, nodes=[[0, 1], [2]])


@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED", "PER_RANK", "PER_NODE", "SHARDED"])
def test_every_pattern_gives_each_rank_its_large_values(
    pattern: str, small_limit: None, tmp_path: Path
) -> None:
    of = {"PER_RANK": lambda r: r, "PER_NODE": lambda r: r // 2}.get(pattern, lambda r: 7)
    found = saved_by(
        tmp_path, SharingPattern(pattern), lambda rank: {"a": bytes([of(rank)]) * 50, "n": of(rank)}
    )
    assert found == [{"a": bytes([of(rank)]) * 50, "n": of(rank)} for rank in range(3)]


def test_large_values_of_replicas_are_compared_to_the_last_byte(tmp_path: Path) -> None:
    """QUICK looks at samples of tensors, and at plain values in full, wherever they are stored."""
    frame = bytes(1 << 20)
    other = frame[:333_333] + b"\x01" + frame[333_334:]
    with pytest.raises(ReplicationMismatch, match="'frames/1'"):
        saved_by(
            tmp_path,
            SharingPattern.REPLICATED,
            lambda rank: {"frames": [b"", other if rank == 2 else frame]},
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_more_plain_values_than_readers_take_are_refused_before_a_byte_is_written(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.state.tree.VALUES_LIMIT", 20_000)
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as ckpt:
        ckpt.save(1, {"a": {"n": 1}})
        with pytest.raises(UnsupportedValue) as refused:
            getattr(ckpt, how)(
                2,
                {
                    "a": {"n": 1},
                    "b": {"deep": [{"order": list(range(10_000))}], "w": torch.ones(1)},
                },
            )
        assert (refused.value.component, refused.value.key) == ("b", "deep/0/order")
        assert "20,000" in str(refused.value) and "tensor" in str(refused.value)
        assert [info.step for info in ckpt.list()] == [1]
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_components_that_are_too_much_only_together_are_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.state.tree.VALUES_LIMIT", 20_000)

    def program(comm: Any) -> Any:
        parts = {f"part{n}": {"order": list(range(1000 * (1 + n)))} for n in range(5)}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            try:
                ckpt.save(1, parts)
            except UnsupportedValue as error:
                return error.component, error.key

    assert run_ranks(2, program) == [("part4", "order")] * 2
    assert not any(tmp_path.iterdir())


def test_the_limit_is_below_what_readers_take() -> None:
    from ckptcore.state.tree import VALUES_LIMIT

    assert SIZE_LIMIT * 0.9 < VALUES_LIMIT < SIZE_LIMIT
