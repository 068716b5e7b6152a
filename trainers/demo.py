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
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import click

from ckptcore import open_checkpoint, scan_root

MARKER = ".made-by-ckpt-demo"
LABELS = {
    "model": "weights",
    "optimizer": "optimizer moments",
    "rng": "RNG states",
    "scheduler": "schedule",
    "loader": "data position",
    "trainer": "step, losses, log",
}
CKPT = (sys.executable, "-m", "ckpt_tools.main")
TIMES = ("tok_per_sec", "mfu", "peak_mem")  # in the log, and never the same twice
LONGEST = 0.02  # seconds from the beginning of a save to its kill

_began = time.perf_counter()


def say(text: str) -> None:
    click.echo(f"{time.perf_counter() - _began:6.1f} s  {text}")


def ckpt(*words: str) -> bool:
    click.echo(f"\n$ ckpt {' '.join(words)}")
    return subprocess.run([*CKPT, *words]).returncode == 0


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """One training process; the same command starts a run and resumes it."""
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "save_steps": max(1, steps // 15),
        "save_total_limit": 3,
        "eval_steps": max(1, steps // 5),
        "logging_steps": 1,
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


def partials(folder: Path) -> set[str]:
    """Saves that have begun and not ended, as they are seen from outside."""
    names = os.listdir(folder) if folder.is_dir() else ()
    return {name for name in names if name.startswith("checkpoint-") and ".partial-" in name}


def kill_inside_a_save(
    process: subprocess.Popen[bytes], folder: Path, number: int, chance: random.Random
) -> Path:
    """SIGKILLs the process in its save `number`, or a later one; what that left."""
    known, count = partials(folder), 0
    while process.poll() is None:
        time.sleep(0.0003)
        if not (fresh := partials(folder) - known):
            continue
        known |= fresh
        count += 1
        if count < number:
            continue
        delay = chance.uniform(0, LONGEST)
        until = time.perf_counter() + delay
        while time.perf_counter() < until:
            pass  # sleeping is too coarse for this
        # Halt it first, so that what is looked at is what is killed.
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        partial = folder / fresh.pop()
        if partial.exists():
            process.kill()
            process.wait()
            say(f"SIGKILL {delay * 1e3:.1f} ms into save {count} of this process")
            return partial
        process.send_signal(signal.SIGCONT)  # the save was over: try the next
    ended = f"the run ended (exit code {process.returncode}) before a save was hit"
    raise SystemExit(f"{ended}; see {folder}.log")


def kill_and_show(folder: Path, steps: int, number: int, chance: random.Random) -> None:
    """Starts or resumes the run, kills it inside a save, and shows what that left on the disk."""
    process = start(folder, steps)
    try:
        partial = kill_inside_a_save(process, folder, number, chance)
    finally:
        process.kill()
        process.wait()
    say(f"on disk at the kill: {partial.name}/")
    for file in sorted(partial.iterdir()):
        say(f"    {file.stat().st_size:>12,} bytes  {file.name}")
    whole = [entry.name for entry in scan_root(str(folder)) if entry.status == "committed"]
    say(f"committed beside it: {', '.join(whole)}")


def compare(reference: Path, killed: Path, steps: int) -> bool:
    """Prints what was compared and says whether all of it is equal: also the loss of each step,
    which is in the log that a checkpoint keeps."""
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
    return equal


def fresh(folder: Path) -> None:
    """An empty demo folder; only one that an earlier demo made is emptied."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            what = f"{folder} is not empty and not of an earlier demo"
            raise click.UsageError(f"{what}; give another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default="demo-runs", show_default=True)
@click.option("--steps", type=click.IntRange(min=30), default=300, show_default=True)
@click.option(
    "--seed", type=int, help="Of the moments of the kills.  [default: random, and printed]"
)
def main(folder: Path, steps: int, seed: int | None) -> None:
    """Kill a run inside a save, twice; resume it; compare it with one left alone."""
    fresh(folder)
    seed = secrets.randbits(31) if seed is None else seed
    chance = random.Random(seed)
    reference, killed = folder / "reference", folder / "killed"
    runs = f"two runs of {steps} steps, one uninterrupted, one killed twice inside a save"
    say(f"{runs} (--seed {seed})")
    undisturbed = start(reference, steps)
    try:
        for fewest, most in ((2, 6), (1, 5)):
            kill_and_show(killed, steps, chance.randint(fewest, most), chance)
            say("the same command again: it resumes")
        finish(start(killed, steps), killed)
        finish(undisturbed, reference)
    finally:
        undisturbed.kill()
        undisturbed.wait()
    for line in killed.with_suffix(".log").read_text().splitlines():
        if line.startswith(("resumed", "finished", "warning")):
            say(f"killed.log: {line}")
    say(f"partial saves left in {killed}: {', '.join(sorted(partials(killed))) or 'none'}\n")
    equal = compare(reference, killed, steps)
    same = "EQUAL: the killed and resumed run is the uninterrupted run, bit for bit"
    say(same if equal else "NOT EQUAL")
    last = str(killed / f"checkpoint-{steps}")
    shown = [ckpt("ls", str(killed)), ckpt("inspect", last), ckpt("verify", last)]
    if not equal or not all(shown):
        sys.exit(1)


if __name__ == "__main__":
    main()
