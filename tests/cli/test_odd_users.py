"""What people do that was not meant: typos, folders of other libraries, storages that do not exist;
each gets one clear sentence and the right exit code."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from ckpt_tools import upkeep

from ckptcore import CheckpointManager, StorageError
from ckptcore.testing.processes import patience

from .conftest import Ckpt, save_run


@pytest.fixture
def newer_damaged(root: Path) -> Path:
    """The newest of three has a file that is cut short."""
    shard = root / "checkpoint-30" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    return root


@pytest.mark.parametrize(
    "words",
    [
        ["show", "ROOT", "train/step"],
        ["plan", "ROOT", "--world-size", "1"],
        ["export", "ROOT", "OUT", "--dry-run"],
        ["report", "ROOT", "-o", "OUT.html"],
        ["cp", "ROOT", "OUT"],
    ],
)
def test_who_gets_an_older_checkpoint_is_warned(
    ckpt: Ckpt, newer_damaged: Path, tmp_path: Path, words: list[str]
) -> None:
    places = {"ROOT": newer_damaged, "OUT": tmp_path / "out", "OUT.html": tmp_path / "out.html"}
    done = ckpt(*(places.get(word, word) for word in words))
    assert done.code == 0
    assert "warning: took checkpoint-20: checkpoint-30 is damaged (" in done.err


def test_a_metric_that_no_checkpoint_has_deletes_nothing(ckpt: Ckpt, root: Path) -> None:
    done = ckpt("prune", root, "--keep", "best=los:min", "--yes")
    assert done.code == 3 and "has 'los'; they have accuracy, loss" in done.err
    assert len(list(root.glob("checkpoint-*"))) == 3


@pytest.mark.parametrize("rule", ["last=x", "every=6x", "best=loss:min:two", "bogus=1", "last"])
def test_a_rule_that_is_none_says_what_rules_are(ckpt: Ckpt, root: Path, rule: str) -> None:
    done = ckpt("prune", root, "--keep", rule)
    assert (
        done.code == 2 and "rules are last=N, best=METRIC" in done.err and "int()" not in done.err
    )


def test_prune_with_nothing_to_do_says_so(ckpt: Ckpt, root: Path) -> None:
    for words in (["--partials"], ["--keep", "last=9"]):
        said = ckpt("prune", root, *words).out
        assert "there is nothing to remove" in said and "--yes" not in said
    assert "--yes does it" in ckpt("prune", root, "--keep", "last=1").out


def test_storages_that_do_not_exist_are_storage_errors(ckpt: Ckpt, tmp_path: Path) -> None:
    for words in (["ls"], ["doctor"], ["prune", "--keep", "last=1"], ["verify"], ["rm"]):
        done = ckpt(words[0], "bogus://x/y", *words[1:])
        assert done.code == 4 and "Protocol not known: bogus" in done.err, words
    assert ckpt("watch", "", "--timeout", "0").code == 3


def test_folders_of_other_libraries_are_recognised(ckpt: Ckpt, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model_state.pt")
    for command in ("ls", "inspect", "verify"):
        done = ckpt(command, tmp_path)
        assert done.code == 3 and f"`ckpt import {tmp_path} ROOT` makes a checkpoint" in done.err
    done = ckpt("verify", tmp_path / "model_state.pt")
    assert done.code == 3 and "ckpt import reads what other libraries wrote" in done.err


def test_a_root_of_ours_needs_no_import(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    done = ckpt("import", root, tmp_path / "new")
    assert done.code == 1 and "is a root of ckptcore, with checkpoint-10" in done.err


class Executed:
    def __reduce__(self) -> object:
        return os.system, ("false",)


def test_a_file_that_is_not_read_gets_one_sentence(ckpt: Ckpt, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": Executed()}))
    (tmp_path / "b.pt").write_bytes(b"root:x:0:0:root:/root:/bin/bash\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("a.pt", "b.pt"):
            done = ckpt("import", tmp_path / name, tmp_path / "new")
            assert done.code == 1 and len(done.err.splitlines()) == 1
            assert "which would be executed" in done.err and "list index" not in done.err


def test_watch_begins_with_what_restore_would_take(ckpt: Ckpt, tmp_path: Path) -> None:
    save_run(tmp_path, (50,), run_id="a")
    save_run(tmp_path, (40,), run_id="b")
    latest = ckpt("ls", tmp_path, "--json").document["latest"]
    events = [
        json.loads(x) for x in ckpt("watch", tmp_path, "--timeout", "0", "--json").out.splitlines()
    ]
    assert [event["name"] for event in events] == [latest] == ["checkpoint-40"]


def test_doctor_says_whether_bytes_were_read(ckpt: Ckpt, root: Path) -> None:
    assert "--verify reads every byte" in ckpt("doctor", root).out
    assert ckpt("doctor", root, "--verify").out.endswith("nothing needs doing\n")


def test_targets_that_cannot_be_written(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = ckpt("report", root, "-o", tmp_path / "file" / "r.html")
    assert done.code == 3 and "it is a folder, or in none" in done.err
    done = ckpt("export", root, tmp_path / "file" / "model")
    assert done.code == 4 and "[Errno" not in done.err and str(tmp_path / "file") in done.err
    done = ckpt("export", root, "/proc/none/model")
    assert done.code == 4 and "No such file" in done.err
    done = ckpt("export", root, tmp_path / "out", "--component", "modle")
    assert done.code == 1 and "has no component 'modle'" in done.err


def test_ctrl_c_ends_watch(root: Path) -> None:
    command = [sys.executable, "-m", "ckpt_tools.main", "watch", str(root), "--interval", "0.05"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type,return-value]
    )
    assert process.stdout is not None and process.stderr is not None
    assert b"committed" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(30 * patience()) == 130
    assert process.stderr.read().strip() == b"ckpt: interrupted"
    process.stdout.close()
    process.stderr.close()


def test_a_closed_output_is_no_crash(root: Path) -> None:
    for closed in (">&-", "2>&-"):
        line = f'"{sys.executable}" -m ckpt_tools ls "$0" {closed}'
        done = subprocess.run(
            ["sh", "-c", line, str(root)], capture_output=True, timeout=60 * patience()
        )
        assert done.returncode == 0 and done.stderr == b"", closed


def test_what_could_not_be_removed_is_not_said_to_be(
    ckpt: Ckpt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = upkeep.delete_checkpoint

    def refused(url: str, *how: object) -> None:
        if url.endswith("checkpoint-10"):
            raise StorageError("Permission denied")
        delete(url, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(upkeep, "delete_checkpoint", refused)
    dry = ckpt("prune", root, "--keep", "last=1", "--json").document
    done = ckpt("prune", root, "--keep", "last=1", "--yes")
    assert done.code == 1 and "1 deletion failed" in done.err
    fates = {row[1]: row[4:6] for row in (line.split() for line in done.out.splitlines()[1:4])}
    assert fates["checkpoint-10"] == ["still", "there"] and fates["checkpoint-20"][0] == "removed"
    assert "checkpoint-10: Permission denied" in done.out
    again = ckpt("prune", root, "--keep", "last=1", "--yes", "--json").document
    assert (again["removed"], again["frees_bytes"]) == ([], 0) and dry["frees_bytes"] > 0


def test_watch_says_that_it_waits(ckpt: Ckpt, tmp_path: Path) -> None:
    done = ckpt("watch", tmp_path / "nowhere", "--timeout", "0")
    assert done.code == 0 and "waiting    there is no checkpoint yet" in done.out


def test_many_metrics_are_cut_to_one_screen(ckpt: Ckpt, tmp_path: Path) -> None:
    metrics = {f"m{n:02d}": float(n) for n in range(60)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"train": {"step": 1}}, metrics=metrics)
    shown = ckpt("inspect", tmp_path).out.splitlines()
    assert len(shown) < 40 and shown[-1] == "  ... and 40 more: ckpt inspect --json has all"
    assert ckpt("ls", tmp_path).out.rstrip().endswith("m04=4 ... 60 in all")
    assert ckpt("inspect", tmp_path, "--json").document["checkpoint"]["metrics"] == metrics


def test_a_long_value_is_cut_and_says_so(ckpt: Ckpt, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        state = {"replay": list(range(5000)), "short": "x", "text": "long é " * 20_000}
        manager.save(1, {"m": state})
    said = ckpt("show", tmp_path, "m/replay").out
    assert "[0, 1, 2," in said and "letters: --json has all)" in said and len(said) < 2200
    assert ckpt("show", tmp_path, "m/short").out.splitlines()[1] == '  "x"'
    assert '"long é long é' in ckpt("show", tmp_path, "m/text").out
    assert ckpt("show", tmp_path, "m/text", "--json").document["value"] == state["text"]


@pytest.mark.parametrize(
    "words",
    [
        ["--dtype", "int4"],
        ["--max-shard-size", "many"],
        ["--quantize", "bogus", "--linear", "x"],
        ["--quantize", "int4-weight-only", "--linear", "x", "--to", "torch"],
    ],
)
def test_what_an_export_does_not_know_is_a_usage_error(
    ckpt: Ckpt, root: Path, tmp_path: Path, words: list[str]
) -> None:
    done = ckpt("export", root, tmp_path / "out", "--dry-run", *words)
    assert done.code == 2 and done.out == ""
    told = ckpt("export", root, tmp_path / "out", *words, "--json").document["error"]
    assert (told["kind"], told["type"]) == ("usage", "InvalidArgument")


def test_a_root_may_be_called_as_a_tensor_file_is(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    named = root.rename(tmp_path / "weights.safetensors")
    shown = ckpt("inspect", named, "--json").document
    assert shown["checkpoint"]["name"] == "checkpoint-30" and shown["tensors"] is None


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_the_model_of_an_import_says_what_an_optimizer_numbers(ckpt: Ckpt, tmp_path: Path) -> None:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    file, new = tmp_path / "all.pt", tmp_path / "new"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    without = ckpt("import", file, new, "--dry-run")
    assert "left out: all.pt: the optimizer numbers its 4 parameters" in without.out
    assert "ckpt import --model" in without.out
    how = ["--model", f"{__name__}:two_layers"]
    document = ckpt("import", file, new, *how, "--json").document
    assert document["left"] == [] and [c["key"] for c in document["components"]] == [
        "model",
        "optimizer",
    ]
    first = ckpt("show", new, "optimizer/state/0.weight/exp_avg", "--json").document["tensor"]
    assert first["first"] == optimizer.state_dict()["state"][0]["exp_avg"].reshape(-1).tolist()
    wrong = ckpt("import", file, new, "--model", "torch.nn:Nothing")
    assert wrong.code == 2 and "is no function as in package.module:function" in wrong.err


def test_a_safetensors_file_is_called_so(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    weights = root / "checkpoint-30" / "model.safetensors"
    document = ckpt("import", weights, tmp_path / "new", "--json").document
    assert (document["format"], document["components"][0]["key"]) == ("safetensors", "model")
