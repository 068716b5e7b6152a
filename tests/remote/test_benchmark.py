"""`python -m benchmarks remote` measures what it says, with figures that mean nothing at this
size."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("boto3")
pytest.importorskip("s3fs")
sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # run from the repository, not installed

from benchmarks import remote


def test_every_contender_is_measured(tmp_path):
    report = remote.run(tmp_path, size=1 << 20, rounds=1)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [remote.SAVE, remote.LOAD, *remote.UP, *remote.DOWN]
    assert [row.problem for row in report.rows] == [None] * 6
    assert all(row.median > 0 for row in report.rows)
    assert int(rows[remote.SAVE].extra["requests"]) >= 10
    assert int(rows[remote.LOAD].extra["requests"]) >= 6
    assert len(report.checks) == 4
