"""The examples of docs/patterns.md run on real ranks, twice: the second time they go on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ckptcore

PAGE = Path(ckptcore.__file__).parent.parent / "docs" / "patterns.md"
RANKS = 4

# Ranks are forked from one process, which has imported torch once for all examples.
PROGRAM = """
import os, sys, traceback
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel
import ckptcore.manager, ckptcore.preemption
texts, port = sys.stdin.read().split("\\0"), int(sys.argv[1])
for number, text in enumerate(texts):
    children = []
    for rank in range(RANKS):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + number)}
            code = 1
            try:
                names = {"__name__": "__main__"}
                exec(text, names)
                names["dist"].destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(number, codes, flush=True)
""".replace("RANKS", str(RANKS))


def examples() -> dict[str, str]:
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(blocks)


def test_every_block_has_a_name() -> None:
    assert len(examples()) == PAGE.read_text().count("```python")


@pytest.mark.timeout(240)
def test_the_examples_run_and_go_on(tmp_path: Path) -> None:
    first, *rest = examples().items()
    texts = [f"{first[1]}\n{text}" for _, text in rest]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(port)],
        input="\0".join([text for text in texts for _ in range(2)]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as torchrun has it
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    good = [f"{number} {[0] * RANKS}" for number in range(2 * len(texts))]
    assert done.stdout.splitlines() == good, done.stderr[-3000:]
    steps = {
        root.name: [info.step for info in ckptcore.scan_root(root)]
        for root in (tmp_path / "runs").iterdir()
    }
    assert steps == {
        "ddp": [1, 2, 3, 4],
        "fsdp2": [1, 2, 3, 4],
        "tp": [1, 2],
        "pipeline": [1, 2],
        "dp-pp": [1, 2],
        "experts": [1, 2],
        "nodes": [1, 2],
        "resize": [1, 2],
    }
    patterns = {
        root.name: {
            key: component.pattern
            for key, component in ckptcore.open_checkpoint(
                ckptcore.scan_root(root)[-1].url
            ).manifest.components.items()
        }
        for root in (tmp_path / "runs").iterdir()
    }
    assert patterns == {
        "ddp": {
            "model": "REPLICATED",
            "optimizer": "REPLICATED",
            "position": "PER_RANK",
            "rng": "PER_RANK",
        },
        "fsdp2": {"model": "SHARDED", "optimizer": "SHARDED"},
        "tp": {"model": "SHARDED", "optimizer": "SHARDED"},
        "pipeline": {"model": "SHARDED", "optimizer": "SHARDED"},
        "dp-pp": {"model": "SHARDED", "loader": "PER_GROUP"},
        "experts": {"experts": "SHARDED"},
        "nodes": {"files": "PER_NODE"},
        "resize": {"loader": "PER_RANK", "rng": "PER_RANK"},
    }
