"""`python -m benchmarks.integrations`: the checkpoints of libraries beside those of
`ckptcore.integrations`, in one scenario.

A GPT-2 with dropout trains for eight steps on the CPU, four an epoch, and saves after the second
and sixth. Another process goes on from the sixth. Each library runs with its own checkpoints and
with ours: how long the loop stands still in a save (the second, in whose memory the first was), how
long the resume takes, the bytes of a checkpoint, and what the resumed run has otherwise than the
one that went on.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

WORDS, LENGTH, STEPS, SAVES = 256, 16, 8, (2, 6)


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * (number + 1)) % WORDS
        return {"input_ids": words, "labels": words}


def gpt2(width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config)


class Run:
    """What one process saw."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.saves: list[float] = []
        self.load = 0.0

    def timed(self, call: Any) -> Any:
        def measured(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **named)
            self.saves.append(time.perf_counter() - start)
            return result

        return measured

    def result(self, parameters: Any, optimizer: Any) -> dict[str, Any]:
        parameters = list(parameters)
        weights = b"".join(p.detach().numpy().tobytes() for p in parameters)
        moments = b"".join(optimizer.state[p]["exp_avg"].numpy().tobytes() for p in parameters)
        return {
            "losses": self.losses,
            "weights": hashlib.sha256(weights).hexdigest(),
            "moments": hashlib.sha256(moments).hexdigest(),
            "draw": [torch.rand(1).item(), random.random()],
            "saves": self.saves,
            "load": self.load,
        }


def with_transformers(folder: Path, ours: bool, resumes: bool, width: int) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptcore.integrations.transformers import EngineTrainer

    run, begun = Run(), 0.0

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.load = time.perf_counter() - begun

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step in SAVES

    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    kind = EngineTrainer if ours else Trainer
    trainer = kind(model=gpt2(width), args=args, train_dataset=Samples(), callbacks=[Watch()])
    trainer._save_checkpoint = run.timed(trainer._save_checkpoint)
    begun = time.perf_counter()
    trainer.train(resume_from_checkpoint=True if resumes else None)
    logged = trainer.state.log_history
    run.losses = {e["step"]: e["loss"] for e in logged if "loss" in e and e["step"] > SAVES[1]}
    optimizer: Any = trainer.optimizer
    return run.result(trainer.model.parameters(), optimizer.optimizer)


def with_accelerate(folder: Path, ours: bool, resumes: bool, width: int) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from ckptcore import CheckpointManager
    from ckptcore.integrations.accelerate import state_of

    run = Run()
    set_seed(1)
    loading = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model = gpt2(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, start = 0, time.perf_counter()
    ckpt = CheckpointManager(folder)
    state = state_of(accelerator)
    if resumes:
        step = SAVES[1]
        if ours:
            ckpt.restore(state)
        else:
            accelerator.load_state(str(folder / f"step-{step}"))
    run.load = time.perf_counter() - start
    own = run.timed(lambda step: accelerator.save_state(str(folder / f"step-{step}")))
    engine = run.timed(lambda step: ckpt.save_async(step, state))
    while step < STEPS:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step > SAVES[1]:
                run.losses[step] = loss.item()
            if step in SAVES:
                (engine if ours else own)(step)
            if step == STEPS:
                break
    ckpt.close()
    return run.result(model.parameters(), optimizer.optimizer)


def with_lightning(folder: Path, ours: bool, resumes: bool, width: int) -> dict[str, Any]:
    import lightning.pytorch as lightning
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ckptcore.integrations.lightning import EngineCheckpoint

    run, begun = Run(), 0.0

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt2(width)

        def on_train_start(self) -> None:
            run.load = time.perf_counter() - begun

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch).loss
            if self.trainer.global_step >= SAVES[1]:
                run.losses[self.trainer.global_step + 1] = loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Stock(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in SAVES:
                run.timed(trainer.save_checkpoint)(folder / f"{trainer.global_step}.ckpt")

    class Every(EngineCheckpoint):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in SAVES:
                run.timed(super().on_train_batch_end)(trainer)

    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[Every(str(folder), 2) if ours else Stock()],
        logger=False,
        enable_checkpointing=ours,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    path = str(folder / f"{SAVES[1]}.ckpt") if resumes and not ours else None
    begun = time.perf_counter()
    loader = StatefulDataLoader(Samples(), batch_size=2, shuffle=True)
    trainer.fit(module, loader, ckpt_path=path, weights_only=False if path else None)
    return run.result(module.parameters(), trainer.optimizers[0])


LIBRARIES = {
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def size_of(folder: Path) -> int:
    """Of the checkpoint of the last save."""
    newest = next(path for path in folder.iterdir() if str(SAVES[1]) in path.name)
    files = newest.rglob("*") if newest.is_dir() else [newest]
    return sum(path.stat().st_size for path in files if path.is_file())


def child(library: str, folder: str, ours: str, resumes: str, width: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    found = LIBRARIES[library](Path(folder), ours == "1", resumes == "1", int(width))
    print("RESULT" + json.dumps(found), flush=True)


def process(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.integrations", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(lines[0][6:])
    return found


def main(width: int, rounds: int) -> None:
    for library in LIBRARIES:
        for ours in (False, True):
            pauses, loads, lost = [], [], set()
            for _ in range(rounds):
                folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
                try:
                    whole = process(library, folder, int(ours), 0, width)
                    resumed = process(library, folder, int(ours), 1, width)
                    size = size_of(folder)
                finally:
                    shutil.rmtree(folder)
                pauses.append(whole["saves"][1])
                loads.append(resumed["load"])
                for part in ("losses", "weights", "moments", "draw"):
                    if whole[part] != resumed[part]:
                        lost.add(part)
            save, load = statistics.median(pauses), statistics.median(loads)
            whose, differs = "ours" if ours else "its own", ", ".join(sorted(lost)) or "nothing"
            print(
                f"{library:13}{whose:9}save {save:6.3f} s   resume {load:6.3f} s"
                f"   {size / 1e6:8.1f} MB   differs: {differs}"
            )


if __name__ == "__main__":
    if len(sys.argv) > 3:
        child(*sys.argv[1:])
    else:
        main(*(int(x) for x in sys.argv[1:] or ["1024", "3"]))
