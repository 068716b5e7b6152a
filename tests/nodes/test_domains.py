"""Who acts for which storage, where all ranks share one and where every node has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from ckptcore import CheckpointNotFound, StorageError, open_storage
from ckptcore.catalog.catalog import Catalog
from ckptcore.nodes.roots import domains_of
from ckptcore.testing.ranks import run_ranks

NODES = [[0, 1], [2, 3]]
ACTING = {"shared": [0], "node": [0, 2]}


def domains(comm: Any, folder: Path, mode: Literal["shared", "node"]) -> Any:
    with comm.round("nodes", joining=True):
        pass
    root = folder / (f"node{comm.rank // 2}" if mode == "node" else "all")
    return domains_of(comm, Catalog(open_storage(root)), mode)


def run(program: Any, folder: Path, mode: Literal["shared", "node"]) -> list[Any]:
    def caught(comm: Any) -> Any:
        found = domains(comm, folder, mode)
        try:
            return program(comm, found)
        except Exception as error:
            return error
        finally:  # every rank reads its verdict before another one leaves
            with comm.round("all are here", joining=True):
                pass

    return run_ranks(4, caught, nodes=NODES)


@pytest.mark.parametrize("mode", ["shared", "node"])
def test_one_rank_of_each_domain_acts_on_the_verdict(tmp_path: Path, mode: Any) -> None:
    def program(comm: Any, found: Any) -> Any:
        acted = []
        with found.round("test", comm) as r:
            reports = r.gather(comm.rank)
            if r.leads:
                r.verdict = sum(reports)
            if r.acts():
                acted.append(r.verdict)
        return r.verdict, acted, found.leads(comm), list(found.domain_ranks(comm))

    for rank, (verdict, acted, leads, ranks) in enumerate(run(program, tmp_path, mode)):
        acts = rank in ACTING[mode]
        assert (verdict, acted, leads) == (6, [6] if acts else [], acts)
        assert ranks == ([0, 1, 2, 3] if mode == "shared" else NODES[rank // 2])


@pytest.mark.parametrize("mode", ["shared", "node"])
@pytest.mark.parametrize("where", ["before", "deciding", "acting"])
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, mode: Any, where: str) -> None:
    def program(comm: Any, found: Any) -> Any:
        def fail(here: str) -> None:
            if where == here:
                raise StorageError(f"failed {where} it", path="x")

        with found.round("test", comm) as r:
            if comm.rank == 3:
                fail("before")
            r.gather()
            if r.leads:
                fail("deciding")
            if r.acts() and comm.rank == ACTING[mode][-1]:
                fail("acting")

    for error in run(program, tmp_path, mode):
        assert isinstance(error, StorageError)
        assert f"failed {where} it" in str(error)


@pytest.mark.parametrize("mode", ["shared", "node"])
def test_a_call_for_what_is_not_there_fails_before_anybody_acts(tmp_path: Path, mode: Any) -> None:
    def choose(infos: list[Any], step: Any) -> Any:
        raise CheckpointNotFound(f"no step {step} among {len(infos)}", path="x")

    def program(comm: Any, found: Any) -> Any:
        found.act("pin", lambda: 7, choose, lambda info: pytest.fail("acted"))

    for error in run(program, tmp_path, mode):
        assert isinstance(error, CheckpointNotFound)
        assert "no step 7 among 0" in str(error)
