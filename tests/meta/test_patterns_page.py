"""The examples of docs/patterns.md run on real ranks, twice: the second time they go on."""

from __future__ import annotations

import re
from pathlib import Path

import ckptcore
from ckptcore.testing.processes import RankProcesses

PAGE = Path(ckptcore.__file__).parent.parent / "docs" / "patterns.md"
RANKS = 4


def examples() -> dict[str, str]:
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(blocks)


def test_every_block_has_a_name() -> None:
    assert len(examples()) == PAGE.read_text().count("```python")


def test_the_examples_run_and_go_on(tmp_path: Path) -> None:
    first, *rest = examples().items()
    ranks = RankProcesses(Path(__file__).with_name("page_program.py"))
    for name, text in rest:
        for _ in range(2):
            ranks.run("run", RANKS, {"name": name, "text": f"{first[1]}\n{text}"}, folder=tmp_path)
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
