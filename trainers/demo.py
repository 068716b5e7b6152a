"""`make demo`: kill a training run inside a save, twice, and show that the resumed run is the same
run.

demo-runs/reference   trained without interruption
demo-runs/killed      the same, SIGKILLed inside two of its saves and started again each time
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click

from ckptcore import open_checkpoint, scan_root

from .callbacks.loss_record import LOSSES, read_losses

MARKER = ".made-by-ckpt-demo"
LABELS = {
    "model": "weights",
    "optimizer": "optimizer moments",
    "rng": "RNG states",
    "scheduler": "schedule",
    "loader": "data position",
    "trainer": "step and log",
}
CKPT = (sys.executable, "-m", "ckpt_tools.main")
TIMES = ("tok_per_sec", "mfu", "peak_mem")  # in the log, and never the same twice


@dataclass
class Watcher:
    """Sees a run's saves from outside, by the partial folders that appear in its output folder.

    durations: seconds of the saves that were left alone.
    """

    folder: Path
    seen: set[str] = field(default_factory=set)
    durations: list[float] = field(default_factory=list)

    def partials(self) -> set[str]:
        """Attempts on disk now."""
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        return {name for name in names if name.startswith("checkpoint-") and ".partial-" in name}

    def next_save(self, process: subprocess.Popen[bytes]) -> str | None:
        """Waits for a save to begin; None when the process ended before one did."""
        while process.poll() is None:
            if fresh := self.partials() - self.seen:
                self.seen |= fresh
                return fresh.pop()
            time.sleep(0.0003)
        return None

    def measure(self, name: str) -> None:
        begin = time.perf_counter()
        while (self.folder / name).exists() and time.perf_counter() - begin < 5:
            time.sleep(0.0001)
        self.durations.append(time.perf_counter() - begin)

    def kill_inside_a_save(
        self, process: subprocess.Popen[bytes], number: int, chance: random.Random
    ) -> Path:
        """SIGKILLs the process at a random moment of its save `number`, or of a later one if need
        be."""
        count = 0
        while (name := self.next_save(process)) is not None:
            count += 1
            if count < number:
                self.measure(name)
                continue
            typical = statistics.median(self.durations or [0.02])
            delay = chance.uniform(0, typical)
            until = time.perf_counter() + delay
            while time.perf_counter() < until:
                pass  # sleeping is too coarse for this
            # Halt it first, so that what is looked at is what is killed.
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            partial = self.folder / name
            when = f"{delay * 1e3:.1f} ms"
            if partial.exists():
                process.kill()
                process.wait()
                what = f"SIGKILL {when} into save {count} of this process"
                say(f"{what}; a save takes {typical * 1e3:.1f} ms")
                return partial
            say(f"save {count} was over within {when}; trying the next")
            process.send_signal(signal.SIGCONT)
        ended = f"the run ended (exit code {process.returncode}) before a save was hit"
        raise SystemExit(f"{ended}; see {self.folder}.log")


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """One training process; the same command starts a run and resumes it."""
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": max(1, steps // 15),
        "save_total_limit": 3,
        "eval_steps": max(1, steps // 5),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_data_bytes": steps * 700,  # about 1.5 epochs, so that an epoch ends on the way
        "use_cpu": "true",
        "report_to": "none",
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "ckpt_trainers.main", "--threads", "1", *words]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        process.wait()
    finally:
        process.kill()  # where this program is interrupted
    if process.returncode != 0:
        tail = folder.with_suffix(".log").read_text(errors="replace").splitlines()[-15:]
        failed = f"training in {folder} failed with exit code {process.returncode}:"
        raise SystemExit("\n".join([failed, *tail]))


def kill_and_show(watcher: Watcher, steps: int, number: int, chance: random.Random) -> None:
    """Starts or resumes the run, kills it inside a save, and shows what that left on the disk."""
    process = start(watcher.folder, steps)
    try:
        partial = watcher.kill_inside_a_save(process, number, chance)
    finally:
        process.kill()
        process.wait()
    say(f"on disk at the kill: {partial.name}/")
    files = sorted(partial.iterdir())
    for file in files:
        say(f"    {file.stat().st_size:>12,} bytes  {file.name}")
    if not files:
        say("    (no file yet)")
    whole = [entry.name for entry in scan_root(str(watcher.folder)) if entry.status == "committed"]
    say(f"committed beside it: {', '.join(whole)}")


def compare(reference: Path, killed: Path, steps: int) -> bool:
    """Prints what was compared and says whether all of it is equal."""
    ends = [str(folder / f"checkpoint-{steps}") for folder in (reference, killed)]
    done = subprocess.run([*CKPT, "diff", *ends, "--json"], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    values = [row for row in found["values"] if row["path"].rpartition("/")[2] not in TIMES]
    sizes: Counter[str] = Counter()
    with open_checkpoint(ends[0]) as view:
        for info in view.tensors():
            sizes[info.component] += 0 if info.alias_of else info.nbytes  # tied ones are one
    equal = True
    for part in found["components"]:
        key = part["key"]
        wrong = [row for row in [*found["tensors"], *values] if row["component"] == key]
        missing = part["change"].startswith("only")
        verdict = "equal" if not (wrong or missing) else f"{len(wrong) or 'ALL'} DIFFER"
        tensors = f"{part['tensors']:>5} tensors {sizes[key]:>12,} bytes"
        say(f"{LABELS.get(key, key):<20}{tensors}   {verdict}")
        for row in wrong[:5]:
            say(f"    {row.get('name') or row['path']}: {row['change']}")
        equal = equal and verdict == "equal"
    ours, theirs = read_losses(reference), read_losses(killed)
    wrong = [step for step in range(1, steps + 1) if _hex(ours, step) != _hex(theirs, step)]
    same_file = (reference / LOSSES).read_bytes() == (killed / LOSSES).read_bytes()
    verdict = "equal"
    if wrong or not same_file:
        verdict = f"{len(wrong)} DIFFER, the first at step {min(wrong, default=0)}"
    say(f"{'losses of the steps':<20}{len(theirs):>5} steps{'':>24}{verdict}")
    return equal and same_file and not wrong


def _hex(losses: dict[int, float], step: int) -> str | int:
    return losses[step].hex() if step in losses else -len(losses)  # what is missing equals nothing


def fresh(folder: Path) -> None:
    """An empty demo folder; only one that an earlier demo made is emptied."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            what = f"{folder} is not empty and not of an earlier demo"
            raise click.UsageError(f"{what}; give another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


_began = time.perf_counter()


def say(text: str) -> None:
    click.echo(f"{time.perf_counter() - _began:6.1f} s  {text}")


def ckpt(*words: str) -> bool:
    click.echo(f"\n$ ckpt {' '.join(words)}")
    return subprocess.run([*CKPT, *words]).returncode == 0


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default="demo-runs", show_default=True)
@click.option("--steps", type=click.IntRange(min=30), default=300, show_default=True)
@click.option(
    "--seed", type=int, help="Of the moments of the kills.  [default: random, and printed]"
)
def main(folder: Path, steps: int, seed: int | None) -> None:
    """Kill a training run inside a save, twice; resume it; compare it with one that was left
    alone."""
    fresh(folder)
    seed = secrets.randbits(31) if seed is None else seed
    chance = random.Random(seed)
    reference, killed = folder / "reference", folder / "killed"
    runs = f"two runs of {steps} steps, one uninterrupted, one killed twice inside a save"
    say(f"{runs} (--seed {seed})")
    undisturbed = start(reference, steps)
    try:
        watcher = Watcher(killed)
        kill_and_show(watcher, steps, chance.randint(2, 6), chance)
        say("the same command again: it resumes")
        kill_and_show(watcher, steps, chance.randint(1, 5), chance)
        say("the same command again: it resumes and finishes")
        finish(start(killed, steps), killed)
        finish(undisturbed, reference)
    finally:
        undisturbed.kill()
        undisturbed.wait()
    for line in killed.with_suffix(".log").read_text().splitlines():
        if line.startswith(("resumed", "finished", "warning")):
            say(f"killed.log: {line}")
    left = sorted(watcher.partials())
    say(f"partial saves left in {killed}: {', '.join(left) or 'none'}")

    click.echo()
    equal = compare(reference, killed, steps)
    same = "EQUAL: the killed and resumed run is the uninterrupted run, bit for bit"
    say(same if equal else "NOT EQUAL")
    last = str(killed / f"checkpoint-{steps}")
    shown = [ckpt("ls", str(killed)), ckpt("inspect", last), ckpt("verify", last)]
    if not equal or not all(shown):
        sys.exit(1)


if __name__ == "__main__":
    main()
