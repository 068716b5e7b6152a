"""`ckpt pin`, `unpin`, `rm`, `prune`, `doctor` and `watch`: what stays, what goes, what is wrong."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from ckpt_tools.watch import gone

from ckptcore import scan_root

from .conftest import Ckpt, save_run

MANIFEST = "checkpoint_manifest.json"


def names(root: Path | str, **options: Any) -> list[str]:
    return [info.name for info in scan_root(root, options or None)]


def test_pin_rm_and_unpin(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-10"
    done = ckpt("pin", folder, root / "checkpoint-20", "--json")
    assert [(c["name"], c["pinned"]) for c in done.document["checkpoints"]] == [
        ("checkpoint-10", True),
        ("checkpoint-20", True),
    ]
    refused = ckpt("rm", folder, "--yes")
    assert refused.code == 1 and "is pinned: ckpt unpin" in refused.err
    assert ckpt("unpin", folder).code == 0
    dry = ckpt("rm", folder, "--json")
    assert dry.document["dry_run"] is True and dry.document["frees_bytes"] > 0
    assert names(root) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert ckpt("rm", folder, "--yes").code == 0
    assert names(root) == ["checkpoint-20", "checkpoint-30"] and not folder.exists()
    assert ckpt("pin", folder).code == 3
    whole = ckpt("rm", root, "--yes")
    assert whole.code == 2 and "is a root with checkpoint-20, checkpoint-30" in whole.err


def test_rm_of_what_is_damaged_must_be_said(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-30"
    (folder / MANIFEST).unlink()
    (folder / "mine.txt").touch()
    assert ckpt("rm", folder, "--yes").code == 1 and folder.exists()
    assert ckpt("rm", folder, "--damaged", "--yes").code == 0
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_prune_says_which_rule_keeps_what(ckpt: Ckpt, root: Path) -> None:
    rules = ["--keep", "last=1,best=loss:max", "--json"]
    document = ckpt("prune", root, *rules).document
    assert document["dry_run"] is True and document["removed"] == []
    assert {c["name"]: c["reasons"] for c in document["checkpoints"]} == {
        "checkpoint-10": ["best=loss:max"],
        "checkpoint-20": [],
        "checkpoint-30": ["last=1", "newest"],
    }
    assert len(names(root)) == 3
    assert ckpt("prune", root, *rules, "--yes").document["removed"] == ["checkpoint-20"]
    assert names(root) == ["checkpoint-10", "checkpoint-30"]


@pytest.mark.parametrize(
    "rule", ["last=x", "last=0", "frist=2", "best=", "every=", "best=a:b", "every=-1h"]
)
def test_a_wrong_rule_deletes_nothing(ckpt: Ckpt, root: Path, rule: str) -> None:
    done = ckpt("prune", root, "--keep", rule, "--yes")
    assert done.code == 2 and rule in done.err and len(names(root)) == 3


def test_prune_needs_a_rule_and_a_root(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("prune", root).code == 2
    assert ckpt("prune", root / "checkpoint-10", "--keep", "last=1").code == 2
    assert ckpt("prune", root, "--keep", "last=1", "--run", "another").code == 3


def test_partials_of_the_dead_go_and_those_that_may_live_stay(ckpt: Ckpt, root: Path) -> None:
    run, machine, *_ = (
        ckpt("inspect", root, "--json").document["checkpoint"]["attempt_id"].split("-")
    )
    dead = root / f"checkpoint-40.partial-{run}-{machine}-999999999-1-1"
    away = root / f"checkpoint-40.partial-{run}-00000000-7-1-1"
    for folder in (dead, away):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    found = ckpt("doctor", root, "--json")
    assert found.code == 1
    kinds = {f["name"]: (f["kind"], f["severity"]) for f in found.document["findings"]}
    assert kinds == {dead.name: ("leftover", "problem"), away.name: ("in_progress", "note")}
    (mend,) = next(f["mend"] for f in found.document["findings"] if f["name"] == dead.name)
    assert mend.endswith("--partials --yes")
    document = ckpt("prune", root, "--partials", "--yes", "--json").document
    assert document["removed"] == [dead.name] and document["frees_bytes"] == 100
    assert away.exists() and not dead.exists()
    assert ckpt("doctor", root).code == 0


def test_doctor_says_what_mends_it(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    good = ckpt("doctor", root, "--verify")
    assert good.code == 0 and "nothing needs doing" in good.out
    shutil.copytree(root, tmp_path / "tier")
    shard = root / "checkpoint-30" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = ckpt("doctor", root, "--tier", tmp_path / "tier", "--json")
    assert done.code == 1
    document = done.document
    assert document["restores"] == "checkpoint-20" and document["ok"] is False
    (finding,) = document["findings"]
    assert "goes on from step 20" in finding["message"] and "bytes" in finding["message"]
    import shlex

    command = shlex.split(finding["mend"][0])
    assert command[:2] == ["ckpt", "cp"] and ckpt(*command[1:]).code == 0
    assert ckpt("doctor", root).code == 0

    (root / "checkpoint-30" / MANIFEST).write_text("{}")
    shutil.rmtree(tmp_path / "tier" / "checkpoint-30")
    (mend,) = ckpt("doctor", root, "--json").document["findings"][0]["mend"]
    assert ckpt(*shlex.split(mend)[1:]).code == 0
    assert ckpt("doctor", root).code == 0 and names(root) == ["checkpoint-10", "checkpoint-20"]


def test_doctor_reads_bytes_when_asked_and_knows_foreign_folders(ckpt: Ckpt, root: Path) -> None:
    shard = root / "checkpoint-30" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (root / "checkpoint-50").mkdir()
    (root / "checkpoint-50" / "pytorch_model.bin").touch()
    quick = ckpt("doctor", root, "--json")
    assert quick.code == 0
    (note,) = quick.document["findings"]
    assert (note["kind"], note["severity"]) == ("foreign", "note")
    assert note["mend"][0].startswith("ckpt import ")
    assert ckpt("doctor", root, "--verify").code == 1


def test_doctor_of_two_runs(ckpt: Ckpt, root: Path) -> None:
    save_run(root, (5,), run_id="run-b")
    document = ckpt("doctor", root, "--json").document
    assert document["runs"] == ["run-a", "run-b"]
    assert (document["restores"], document["run_id"]) == ("checkpoint-5", "run-b")
    assert "run-b (saved last)" in ckpt("doctor", root).out


def test_watch_follows_a_run(ckpt: Ckpt, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_run(root, (1,), run_id="r")
    saver = threading.Timer(0.05, save_run, (root, (4,)), {"run_id": "r"})
    saver.start()
    done = ckpt("watch", root, "--interval", "0.02", "--timeout", "60", "--events", "2", "--json")
    saver.join()
    assert done.code == 0
    from json import loads

    events = [loads(line) for line in done.out.splitlines()]
    seen = [e for e in events if e["event"] == "committed"]
    assert events[0]["name"] == "checkpoint-1" and events[0]["schema"] == 1
    if len(seen) == 2:  # else the look fell into the save: "writing"
        assert seen[1]["steps_since"] == 3 and seen[1]["bytes_per_second"] > 0
        assert sum(seen[1]["timings"].values()) == pytest.approx(seen[1]["seconds"], abs=1e-5)


def test_an_attempt_becomes_a_checkpoint_or_has_failed(ckpt: Ckpt, root: Path) -> None:
    attempt = root / "checkpoint-40.partial-a-b-1-2-3"
    attempt.mkdir()

    leaves = threading.Timer(0.2, attempt.rmdir)
    leaves.start()
    done = ckpt("watch", root, "--interval", "0.02", "--timeout", "60", "--events", "3")
    leaves.join()
    kinds = [line.split()[1:3] for line in done.out.splitlines()]
    assert kinds == [
        ["committed", "checkpoint-30"],
        ["writing", "checkpoint-40"],
        ["failed", "checkpoint-40"],
    ]
    assert done.code == 1 and "the save failed" in done.out
    assert gone("checkpoint-9.partial-x", "partial", {"checkpoint-9": ("committed", "d")}) is None
    assert gone("checkpoint-9", "committed", {}) == "deleted"


def test_watch_tells_damage_and_deletion_and_ends_in_time(ckpt: Ckpt, root: Path) -> None:
    (root / "checkpoint-30" / MANIFEST).write_text("{}")
    done = ckpt("watch", root, "--timeout", "0")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].split()[1:3] == ["committed", "checkpoint-20"]
    assert lines[1].split()[1:3] == ["damaged", "checkpoint-30"]
    leaves = threading.Timer(0.05, shutil.rmtree, (root / "checkpoint-30",))
    leaves.start()
    done = ckpt("watch", root, "--interval", "0.02", "--timeout", "60", "--events", "3")
    leaves.join()
    assert done.code == 0 and done.out.split()[-2:] == ["deleted", "checkpoint-30"]
    assert ckpt("watch", root / "nowhere", "--timeout", "0").code == 0


def test_upkeep_on_s3(ckpt: Ckpt, s3: Any) -> None:
    url = s3.new_root()
    save_run(url, (1, 2), run_id="r", storage_options=s3.options)
    from json import dumps

    options = [f"--storage-option={key}={dumps(value)}" for key, value in s3.options.items()]
    assert ckpt("pin", f"{url}/checkpoint-1", *options).code == 0
    assert ckpt("doctor", url, *options, "--verify").code == 0
    document = ckpt("prune", url, "--keep", "last=1", "--json", *options).document
    assert [c["reasons"] for c in document["checkpoints"]] == [["pinned"], ["last=1", "newest"]]
    assert ckpt("unpin", f"{url}/checkpoint-1", *options).code == 0
    assert ckpt("rm", f"{url}/checkpoint-1", "--yes", *options).code == 0
    assert names(url, **s3.options) == ["checkpoint-2"]
    assert ckpt("show", url, "model/layer.bias", "--stats", *options).code == 0
    assert ckpt("watch", url, "--timeout", "0", *options).code == 0
