"""Planning for 4,096 ranks in one process: one table from few descriptions, one writer per box,
even loads."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import CheckpointManager, Shard, SharingPattern, StateComponent, open_checkpoint
from ckptcore.format.layout import Mesh, MeshLayout, WholeLayout, volume
from ckptcore.format.tensorfile import tensor_nbytes
from ckptcore.replicas.shard_table import Description, ShardTable, describe, table_of
from ckptcore.state.layout import LocalShard
from ckptcore.state.tree import LeafSpec, StateSnapshot, TensorLeaf, capture
from ckptcore.testing.ranks import run_ranks

RANKS = 4096
EMPTY = torch.empty(0)


def described(
    tensors: dict[str, tuple[tuple[int, ...], MeshLayout | None]], step: int = 1
) -> Description:
    """What ranks say that hold these tensors: name -> (shape, layout or None for all of it)."""
    rows = []
    for name, (shape, layout) in tensors.items():
        part = LocalShard(EMPTY, shape, ((0,) * len(shape), shape), layout)
        rows.append(TensorLeaf(LeafSpec.of(name, part), EMPTY))
    tree = capture("m", dict.fromkeys(tensors, EMPTY) | {"step": step}).tree
    # Every name refers to its own tensor, though all of them are the same empty one here.
    return describe(StateSnapshot("m", tree, rows))


def merged(
    key: str, texts: list[Description], groups: list[list[int]], *, spread: bool = True
) -> ShardTable:
    return table_of(key, [text.structure for text in texts], groups, spread=spread)


def written(state: ShardTable, world: int) -> Counter[int]:
    """Bytes by writer; every box of every tensor has exactly one, and they make up the tensor."""
    loads: Counter[int] = Counter()
    for tensor in state.tensors:
        assert tensor.layout is not None
        cuts = list(tensor.layout.cuts(tensor.shape, ((0,) * len(tensor.shape), tensor.shape)))
        assert len({writer for writer, _ in cuts}) == len(cuts) == len({box for _, box in cuts})
        assert sum(volume(box[1]) for _, box in cuts) == volume(tensor.shape)
        for writer, box in cuts:
            assert 0 <= writer < world
            assert tensor.layout.box_of(tensor.shape, writer) == box or not volume(box[1])
            loads[writer] += tensor_nbytes(tensor.dtype, box[1])
    return loads


def matrices(count: int, layout: MeshLayout, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}layers.{n}.w": ((8192, 8), layout) for n in range(count)}


def test_one_description_of_all_ranks() -> None:
    mesh = Mesh((8, 512), tuple(range(RANKS)))
    layout = MeshLayout(mesh, ("R", "S0"))
    text = described(matrices(64, layout))
    state = merged("m", [text], [list(range(RANKS))])
    assert state.tensors == merged("m", [text], [list(range(RANKS))]).tensors
    loads = written(state, RANKS)
    assert len(loads) == RANKS  # every replica writes its part of the tensors
    assert max(loads.values()) == min(loads.values()) == 8 * 16 * 8 * 4
    assert state.layouts[0] == [(list(range(RANKS)), layout)]


def test_sixteen_stages_of_a_pipeline() -> None:
    per_stage = RANKS // 16
    texts, groups = [], []
    for stage in range(16):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        layout = MeshLayout(Mesh((4, 64), tuple(ranks)), ("R", "S0"))
        shared = {"norm": ((1024,), MeshLayout(Mesh((per_stage,), tuple(ranks)), ("R",)))}
        texts.append(described({**matrices(16, layout, f"stage{stage}."), **shared}))
        groups.append(list(ranks))
    state = merged("m", texts, groups)
    assert len(state.tensors) == 16 * 16 + 1
    loads = written(state, RANKS)
    assert len(loads) == RANKS
    assert sum(loads.values()) == 16 * 16 * 8192 * 8 * 4 + 4096
    for stage, ranks in enumerate(groups):
        names = {
            t.name
            for t in state.tensors
            if t.layout is not None and t.layout.box_of(t.shape, ranks[0])
        }
        assert {name for name in names if name != "norm"} <= {
            f"stage{stage}.layers.{n}.w" for n in range(16)
        }
    fair = 16 * 8192 * 8 * 4 // per_stage
    assert all(fair <= load <= fair + 4096 for load in loads.values())


def test_plain_replicas_are_spread_over_all_ranks() -> None:
    text = described({f"p{n}": ((1000 + n % 7,), None) for n in range(512)})
    state = merged("m", [text], [list(range(256))])
    loads = written(state, 256)
    assert len(loads) == 256
    assert max(loads.values()) < 2.01 * min(loads.values())
    alone = merged("m", [text], [list(range(256))], spread=False)
    assert written(alone, 256).keys() == {0}
    assert all(isinstance(t.layout, WholeLayout) for t in alone.tensors)


def test_the_order_of_descriptions_changes_no_byte_count() -> None:
    mesh = Mesh((4, 4), tuple(range(16)))
    some, more = (
        {f"a{n}": ((16,), MeshLayout(mesh, ("R", "S0"))) for n in range(8)},
        {"b": ((3,), None)},
    )
    texts = [described(some), described({**some, **more})]
    first = written(merged("m", texts, [list(range(15)), [15]]), 16)
    second = written(merged("m", texts[::-1], [[15], list(range(15))]), 16)
    assert sum(first.values()) == sum(second.values()) == 8 * 64 + 12


@pytest.mark.parametrize("writers", ["split", "lowest"])
def test_replicas_of_boxes_share_the_writing(tmp_path: Path, writers: str) -> None:
    """Four ranks, two halves: each half of eight tensors is on two ranks."""

    def program(comm: Any) -> None:
        at = comm.rank % 2 * 8
        state = {
            f"w{n}": Shard(torch.arange(16.0)[at : at + 8].clone(), (16,), (at,)) for n in range(8)
        }
        with CheckpointManager(tmp_path, comm=comm, writers=writers) as ckpt:
            ckpt.save(1, [StateComponent("s", state, SharingPattern.SHARDED)])

    run_ranks(4, program)
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert view.manifest.components["s"].writers == (
            [0, 1, 2, 3] if writers == "split" else [0, 1]
        )
        assert all(view.read(f"s/w{n}").tolist() == list(range(16)) for n in range(8))


@pytest.mark.stress
@pytest.mark.parametrize("plain", [False, True], ids=["DTensors alone", "with plain replicas"])
def test_2500_tensors_on_4096_ranks(plain: bool) -> None:
    layout = MeshLayout(Mesh((8, 512), tuple(range(RANKS))), ("R", "S0"))
    tensors = matrices(2000, layout) | {
        f"step{n}": ((), None if plain else layout_of_all()) for n in range(500)
    }
    text = described(tensors)
    start = time.perf_counter()
    state = merged("m", [text], [list(range(RANKS))])
    seconds = time.perf_counter() - start
    mine = [t.layout.box_of(t.shape, 1234) for t in state.tensors if t.layout is not None]
    print(
        "merging 2,500 tensors of 4,096 ranks "
        f"({'plain step counters' if plain else 'DTensors alone'}): {seconds:.2f} s; "
        f"rank 1234 writes {sum(box is not None for box in mine)} boxes"
    )
    assert len(state.tensors) == 2500
    assert seconds < 10


def layout_of_all() -> MeshLayout:
    return MeshLayout(Mesh((RANKS,), tuple(range(RANKS))), ("R",))
