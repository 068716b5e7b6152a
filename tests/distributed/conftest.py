"""What the tests of many ranks share: what all ranks must agree on, and real processes that start
in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore.testing.ranks import run_ranks

HERE = Path(__file__).parent


@pytest.fixture
def files() -> Callable[[Path], set[str]]:
    """The names in a folder."""
    return lambda folder: {entry.name for entry in folder.iterdir()}


@pytest.fixture
def on_all() -> Callable[..., Any]:
    """on_all(results, kind): every rank raised exactly `kind`, with the same message and causes;
    rank 0's error."""

    def check(results: list[Any], kind: type[BaseException]) -> Any:
        assert [type(result) for result in results] == [kind] * len(results), results
        assert {str(result) for result in results} == {str(results[0])}
        assert [result.causes for result in results] == [results[0].causes] * len(results)
        return results[0]

    return check


@pytest.fixture
def errors_of() -> Callable[..., list[Any]]:
    """errors_of(world_size, program, ...): what every rank returned or raised, caught inside the
    rank.

    The rank lives on after its error, as in a program that catches it: nobody is helped by its
    leaving the job.
    """

    def run(world_size: int, program: Callable[..., Any], **how: Any) -> list[Any]:
        def caught(comm: Any) -> Any:
            try:
                return program(comm)
            except Exception as error:
                return error
            finally:
                with comm.round("every rank has its verdict", joining=True):
                    pass

        return run_ranks(world_size, caught, **how)

    return run


@pytest.fixture
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest replicated state is split over its ranks."""
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


@pytest.fixture(scope="session")
def processes(jobs_of: Callable[..., Any]) -> Any:
    return jobs_of(
        *(HERE / name for name in ("programs.py", "training.py", "calls.py", "interrupts.py"))
    )
