"""What all tests share: one thread, quick property tests, time limits that this machine can meet, the
slow tail that `make stress` has, and a comparison to the last bit."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time as clock
import tomllib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from ckptcore.testing.processes import PATIENCE, RankProcesses, RanksDied, patience

HERE = Path(__file__).parent
TIMEOUT = "timeout"

torch.set_num_threads(1)
# A shell starts what it runs in the background with interrupts ignored, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "ckptcore",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ckptcore")


# ---------------------------------------------------------------- limits of time

WORK = 2_000_000  # bytes hashed in a piece of work
REFERENCE_SECONDS = 0.0011  # of one piece on a quiet machine


def stretch() -> float:
    """How many times slower than a quiet machine this one is, by what happens to a second of
    work."""
    data, pieces, begin = bytes(WORK), 0, clock.perf_counter()
    while (spent := clock.perf_counter() - begin) < 1.0 or pieces < 10:
        hashlib.sha1(data).digest()
        pieces += 1
    return spent / pieces / REFERENCE_SECONDS


def pytest_configure(config: pytest.Config) -> None:
    """Before workers start, which have the environment of this process."""
    if PATIENCE not in os.environ:
        # Twice: what is quiet now may be busy in a minute.
        os.environ[PATIENCE] = f"{min(20.0, max(2.0, 2.0 * stretch())):.1f}"


def pytest_report_header() -> str:
    return f"time limits: {patience():.1f} times those that stand in the tests"


# ---------------------------------------------------------------- the slow tail


def is_tail(nodeid: str, tails: dict[str, dict[str, Any]]) -> bool:
    """Whether a case of a test is one of those that only `make stress` has (slow_tail.toml)."""
    name, _, case = nodeid.partition("[")
    tail = tails.get(name.removeprefix("tests/"))
    return tail is not None and case.removesuffix("]") not in tail["stays"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tails = tomllib.loads((HERE / "slow_tail.toml").read_text())
    default = float(config.getini(TIMEOUT))
    many = float(os.environ.get("CKPTCORE_TEST_EXAMPLES", "0.25"))
    for item in items:
        if is_tail(item.nodeid, tails):
            item.add_marker(pytest.mark.stress)
        marker = item.get_closest_marker(TIMEOUT)
        seconds = float(marker.args[0]) if marker else default
        item.add_marker(pytest.mark.timeout(seconds * patience()), append=False)
        # Of the examples that a property asks for, `make stress` draws all and more.
        if many != 1 and item.get_closest_marker("hypothesis"):
            test = item.obj  # type: ignore[attr-defined]
            usual = test._hypothesis_internal_use_settings
            count = max(5, int(usual.max_examples * many))
            test._hypothesis_internal_use_settings = settings(usual, max_examples=count)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    return plain.view(words).contiguous().numpy().tobytes()


def _assert_same(found: Any, expected: Any, at: str = "value") -> None:
    assert type(found) is type(expected), f"{at}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert _bits(found) == _bits(expected), at
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype.str, found.shape) == (expected.dtype.str, expected.shape), at
        assert found.tobytes() == expected.tobytes(), at
    elif isinstance(expected, float | complex):
        assert np.complex128(found).tobytes() == np.complex128(expected).tobytes(), (
            f"{at}: {found} is not {expected}"
        )
    elif isinstance(expected, dict):
        assert len(found) == len(expected), at
        for number, (mine, theirs) in enumerate(zip(found.items(), expected.items(), strict=True)):
            _assert_same(mine[0], theirs[0], f"{at}, key {number}")
            _assert_same(mine[1], theirs[1], f"{at}[{theirs[0]!r}]")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), at
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), at
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            _assert_same(mine, theirs, f"{at}[{number}]")
    elif isinstance(expected, set | frozenset):
        assert len(found) == len(expected), at
        for mine, theirs in zip(
            sorted(found, key=_order), sorted(expected, key=_order), strict=True
        ):
            _assert_same(mine, theirs, at)
    elif isinstance(expected, Decimal):
        assert found.as_tuple() == expected.as_tuple(), at
    else:
        assert found == expected, at
        if isinstance(expected, datetime | time):
            assert (found.tzinfo, found.fold) == (expected.tzinfo, expected.fold), at


def _order(item: Any) -> tuple[str, str]:
    return type(item).__name__, repr(sorted(map(repr, item))) if isinstance(
        item, frozenset
    ) else repr(item)


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """same(found, expected): fails unless types, order and every bit are equal, at any depth."""
    return _assert_same


@pytest.fixture(scope="session")
def bits() -> Callable[[torch.Tensor], bytes]:
    """The bytes of a tensor's items in C order."""
    return _bits


def pytest_collection_finish() -> None:
    """What there is now stays to the end: let no collection of garbage look through it again."""
    gc.collect()
    gc.freeze()


class Jobs:
    """Runs the functions of some files on real ranks, forked from one process that has imported
    torch, and these files, already. Each gets a `Job` (distributed/job.py)."""

    def __init__(self, *files: Path) -> None:
        self.ranks = RankProcesses(
            HERE / "distributed" / "job.py", *files, environment={"CUDA_VISIBLE_DEVICES": ""}
        )
        self.modules = [file.stem for file in files]

    def run(
        self, program: str, world_size: int, folder: Path, *, deadline: float = 60, **arguments: Any
    ) -> dict[int, Any]:
        """What every rank's program returned: a dict for an error, {"signal": n} for one that was
        killed. RanksDied when a rank other than a stopped one has not ended after `deadline` s."""
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = self.ranks.outcomes(
            "in_a_job",
            world_size,
            {"modules": self.modules, "call": program, "folder": str(folder), "how": arguments},
            folder=folder,
            deadline=deadline,
            survivors="live",
        )
        if any(outcome.state == "late" for outcome in outcomes):
            raise RanksDied(program, outcomes)
        return {
            outcome.rank: outcome.value
            if outcome.state == "returned"
            else {"signal": -outcome.exit_code}
            for outcome in outcomes
        }


@pytest.fixture(scope="session")
def jobs_of() -> Callable[..., Jobs]:
    """jobs_of(*files): runs the functions of these files on real ranks."""
    return Jobs


class Scripts:
    """Programs in processes of their own, by script_runner.py."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # Python 3.12 says that forking a process with threads is risky; that is the test.
            "PYTHONWARNINGS": "ignore:This process:DeprecationWarning",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "script_runner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def run(
        self,
        folder: Path,
        source: str | Path,
        arguments: Iterable[Any],
        timeout: float,
        whole: bool = False,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> Done:
        """source: the text of a program, or its file. timeout: seconds, times `patience()`. whole:
        to the end of the interpreter, not only of what is registered for it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timeout *= patience()
        number = len(list(folder.glob("out*")))
        out, err = folder / f"out{number}", folder / f"err{number}"
        script = source if isinstance(source, Path) else folder / f"script{number}.py"
        if isinstance(source, str):
            script.write_text(source)
        out.touch()
        err.touch()
        order = {
            "script": str(script),
            "arguments": [*map(str, arguments)],
            "timeout": timeout,
            "out": str(out),
            "err": str(err),
            "whole": whole,
            "folder": str(cwd or Path.cwd()),
            "environment": environment or {},
        }
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], timeout + 45 * patience())
        assert ready, "the process that starts the others does not answer"
        code = json.loads(self.process.stdout.readline())
        if code is None:
            raise TimeoutError(
                f"the program has not ended after {timeout:g} s; it said {out.read_text()!r}, "
                f"{err.read_text()!r}"
            )
        return Done(code, out.read_text(), err.read_text())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20 * patience())


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    started = Scripts()
    yield started
    started.close()


@pytest.fixture
def run_script(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    """run_script(source, *arguments): run a program in a process of its own; its exit code and what
    it said. The rest: see `Scripts.run`."""
    folder = tmp_path_factory.mktemp("scripts")

    def run(source: str | Path, *arguments: Any, timeout: float = 40, **how: Any) -> Done:
        return scripts.run(folder, source, arguments, timeout, **how)

    return run


# An S3 server in a process of its own, on a port that it chooses; it ends when its standard input
# does.
SERVER = """
import sys
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.protocol_version = "HTTP/1.1"
WSGIRequestHandler.log = lambda *_: None
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass
class S3:
    """A server over HTTP, with a bucket in it."""

    port: int
    bucket: str = "runs"

    @property
    def options(self) -> dict[str, Any]:
        return self.options_at(self.port)

    def options_at(self, port: int, **more: Any) -> dict[str, Any]:
        """storage_options for this server, reached by way of another port."""
        where = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "key": "some-key",
            "secret": "some-secret",
        }
        return {**where, "client_kwargs": {"region_name": "us-east-1"}, **more}

    def new_root(self) -> str:
        return f"s3://{self.bucket}/{uuid.uuid4().hex}/run"

    def client(self) -> Any:
        """A plain client, none of ours."""
        boto3 = pytest.importorskip("boto3")
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="some-key",
            aws_secret_access_key="some-secret",
        )


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    for needed in ("s3fs", "moto.server", "flask"):
        pytest.importorskip(needed)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            found = S3(int(server.stdout.readline()))
            found.client().create_bucket(Bucket=found.bucket)
            yield found
        finally:
            server.kill()
