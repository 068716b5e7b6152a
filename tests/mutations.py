"""Faults put into the engine on purpose, and the tests that find them.

    python tests/mutations.py [NUMBER ...]

Each is a small change of one text. In a copy of the tree the named tests have to fail with it. A
mutation that survives, or whose text is not there any more, is printed and makes the exit code 1.
`make mutations` runs all of them: some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """what: the fault in words. file, old, new: the text in it, which is there once, and what takes
    its place. tests: arguments of pytest."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "a file is closed without fsync",
        "ckptcore/storage/local.py",
        "                os.fsync(self.fd)\n",
        "",
        ("tests/crash/test_fault_storage_engine.py", "-k", "synced"),
    ),
    Mutation(
        "the folder of a checkpoint is not synced before it gets its name",
        "ckptcore/catalog/transaction.py",
        "        storage.sync_folder(folder)\n        # Here,",
        "        # Here,",
        ("tests/crash/test_fault_storage_engine.py", "-k", "synced"),
    ),
    Mutation(
        "the rename of a commit is not made durable",
        "ckptcore/catalog/transaction.py",
        '            moved = True\n            storage.sync_folder("")\n',
        "            moved = True\n",
        ("tests/crash/test_fault_storage_engine.py", "-k", "synced"),
    ),
    Mutation(
        "an overwrite takes the old checkpoint away after the new one is there: renames swapped",
        "ckptcore/catalog/transaction.py",
        "            _rename_once(storage, manifest.attempt_id, folder, name)\n            moved = True\n",
        "            storage.rename(folder, aside)\n            moved = True\n",
        ("tests/unit/test_runs_in_a_root.py",),
    ),
    Mutation(
        "the manifest of objects is put where another job has begun",
        "ckptcore/catalog/transaction.py",
        "        check_alone(storage, self.attempt, folder, manifest.files, manifest.step)\n",
        "",
        ("tests/retention/test_races_on_objects.py",),
    ),
    Mutation(
        "the digest of a chunk of a tensor is not checked",
        "ckptcore/loading/reader.py",
        "            if digest != saved:\n",
        "            if not digest:\n",
        ("tests/crash/test_damage.py", "-k", "zeroed_blocks"),
    ),
    Mutation(
        "the digest of an index or of values is not checked",
        "ckptcore/loading/view.py",
        "        if actual != record.digest:\n",
        "        if not actual:\n",
        ("tests/crash/test_damage.py", "-k", "zeroed_blocks"),
    ),
    Mutation(
        "the digest of the header of a tensor file is not checked",
        "ckptcore/loading/reader.py",
        '        if actual != expected:\n            what = f": the header',
        '        if not actual:\n            what = f": the header',
        ("tests/crash/test_damage.py", "-k", "flipped_bit"),
    ),
    Mutation(
        "the size of a file is not compared with the one that was saved",
        "ckptcore/loading/reader.py",
        "        if size is not None and reader.size != size:\n",
        "        if size is not None and reader.size < 0:\n",
        ("tests/unit/test_crafted_checkpoints.py", "-k", "cut_after"),
    ),
    Mutation(
        "an index may name other files than the manifest",
        "ckptcore/loading/view.py",
        "                if known is None or known.digest != digest or known.size != index.files[file].size:\n",
        "                if known is None:\n",
        ("tests/unit/test_crafted_checkpoints.py",),
    ),
    Mutation(
        "replicas that differ are saved",
        "ckptcore/saving/save.py",
        "                unequal = compare.decide(replicas, [each.replicas for each in reports])\n",
        "                compare.decide(replicas, [each.replicas for each in reports])\n",
        ("tests/distributed/test_validation.py",),
    ),
    Mutation(
        "a rank that fails in a round does not say so",
        "ckptcore/ranks/rounds.py",
        "            _raise_failures(self.topic, self.reports, self.joining)\n            return [",
        "            return [",
        ("tests/distributed/test_round.py",),
    ),
    Mutation(
        "KeepLast keeps one too many",
        "ckptcore/catalog/retention.py",
        "checkpoints[-self.count :]",
        "checkpoints[-self.count - 1 :]",
        ("tests/retention/test_cases.py",),
    ),
    Mutation(
        "KeepBest keeps the worst",
        "ckptcore/catalog/retention.py",
        '-1.0 if self.mode == "max" else 1.0',
        '1.0 if self.mode == "max" else -1.0',
        ("tests/retention/test_cases.py",),
    ),
    Mutation(
        "pinned checkpoints are deleted",
        "ckptcore/catalog/catalog.py",
        "if info.name not in keep and not info.pinned]",
        "if info.name not in keep]",
        ("tests/retention/test_pins.py", "tests/retention/test_cases.py"),
    ),
    Mutation(
        "the failure of a save in the background is swallowed",
        "ckptcore/saving/background.py",
        "            self.set_exception(self.failure())\n",
        "            self.give_up()\n            self.set_result(None)\n",
        ("tests/background/test_failures.py",),
    ),
    Mutation(
        "a program whose last save failed ends with code 0",
        "ckptcore/saving/background.py",
        "            os._exit(1)\n",
        "            pass\n",
        ("tests/background/test_program_end.py",),
    ),
    Mutation(
        "a file that two threads want at once is opened without the lock",
        "ckptcore/storage/chunks.py",
        "        with self._lock:\n            if self.opened is None:\n",
        "        if True:\n            if self.opened is None:\n",
        ("tests/unit/test_chunks.py",),
    ),
    Mutation(
        "a shard begins where the first of its cuts begins",
        "ckptcore/format/layout.py",
        "                start, n = start + low, min(step, n - low)\n",
        "                start, n = low, min(step, n - low)\n",
        ("tests/sharded/test_layout_formula.py",),
    ),
    Mutation(
        "a read that stops early goes on at the wrong byte",
        "ckptcore/storage/local.py",
        "        offset += done\n        first = 0\n",
        "        first = 0\n",
        ("tests/unit/test_large_reads.py",),
    ),
    Mutation(
        "a file is taken over for ever: the same bytes in all checkpoints",
        "ckptcore/saving/reuse.py",
        "            if each.times + 1 < self.refresh_every\n",
        "            if each.times >= 0\n",
        ("tests/reuse/test_reuse.py",),
    ),
    Mutation(
        "the state is not copied before training goes on",
        "ckptcore/saving/staging.py",
        "        workers.run(list(_copy_jobs(host)))\n",
        "        pass\n",
        ("tests/background/test_torn.py",),
    ),
]


def tree(folder: Path) -> None:
    """A copy of what git knows of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / name, folder / name)


def fate(mutation: Mutation, folder: Path) -> str:
    """What became of it: the test that found it, or what is wrong."""
    path = folder / mutation.file
    before = path.read_text()
    if before.count(mutation.old) != 1:
        return f"NOT THERE: the text stands {before.count(mutation.old)} times in {mutation.file}"
    path.write_text(before.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, "-m", "not stress", *mutation.tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(before)
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and found:
        return found[0].removeprefix("FAILED ").partition(" - ")[0]
    return f"SURVIVED: pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main(numbers: list[int]) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as made:
        tree(Path(made))
        for number, mutation in enumerate(MUTATIONS, start=1):
            if numbers and number not in numbers:
                continue
            result = fate(mutation, Path(made))
            wrong += result.startswith(("NOT THERE", "SURVIVED"))
            print(f"{number:3} {mutation.what}\n      {result}", flush=True)
    print(f"{wrong} of {len(numbers or MUTATIONS)} were not found")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
