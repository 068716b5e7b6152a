"""`python -m benchmarks.integrations [WIDTH [ROUNDS [LIBRARY ...]]]`: the checkpoints of libraries
beside those of `ckptcore.integrations`, in one scenario.

A GPT-2 with dropout (of peft with LoRA, of torchtitan a Llama) trains for eight steps on the CPU,
four an epoch, and saves after the second and sixth; on one process, and on two (DDP, of torchtitan
FSDP2). One run goes on to the end. Another one is killed by SIGKILL in its seventh step, and
started again. Each library runs with its own checkpoints and with ours: how long the loop stands
still in a save (the second, in whose memory the first was), how long the resume takes, the bytes of
a checkpoint, and what the resumed run has otherwise than the one that went on.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORDS, LENGTH, STEPS, SAVES = 256, 16, 8, (2, 6)
REPO = Path(__file__).resolve().parents[1]
TITAN = REPO / "tests" / "integrations" / "torchtitan_trainer_ranks.py"


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, ranks: int) -> None:
        self.number = 8 * ranks

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) * (number + 1)) % WORDS
        return {"input_ids": words, "labels": words}


def gpt2(width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=width, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config)


@dataclass
class Run:
    """One process of a run, and what it saw."""

    folder: Path
    ours: bool
    phase: str  # "whole", "killed" or "resumed"
    width: int
    ranks: int

    def __post_init__(self) -> None:
        self.losses: dict[int, Any] = {}
        self.saves: list[float] = []
        self.load, self.begun = 0.0, 0.0
        self.resumes = self.phase == "resumed"

    def begin(self) -> None:
        self.begun = time.perf_counter()

    def loaded(self) -> None:
        self.load = time.perf_counter() - self.begun

    def timed(self, call: Any) -> Any:
        def measured(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **named)
            self.saves.append(time.perf_counter() - start)
            return result

        return measured

    def step(self, number: int, loss: Any, wait: Callable[[], Any]) -> None:
        """A step was made. wait: for what is written in the background."""
        if number > SAVES[1]:
            self.losses[number] = loss
            if self.phase == "killed":
                wait()
                if self.ranks > 1:
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    def result(self, parameters: Any, optimizer: Any) -> dict[str, Any]:
        parameters = [p for p in parameters if p.requires_grad]
        moments = (optimizer.state[p]["exp_avg"] for p in parameters)
        return {
            "losses": self.losses,
            "weights": digest(parameters),
            "moments": digest(moments),
            "draws": [torch.rand(1).item(), random.random()],
            "saves": self.saves,
            "load": self.load,
        }


def digest(tensors: Any) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        made.update(whole.detach().contiguous().numpy().tobytes())
    return made.hexdigest()


def with_transformers(run: Run, lora: bool = False) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptcore.integrations.transformers import EngineTrainer

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.loaded()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step in SAVES

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                wait = trainer.manager.wait if run.ours else bool
                run.step(state.global_step, logs["loss"], wait)

    args = TrainingArguments(
        output_dir=str(run.folder),
        max_steps=STEPS,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = gpt2(run.width)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=32, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        model = get_peft_model(model, adapter)
    kind = EngineTrainer if run.ours else Trainer
    trainer = kind(model=model, args=args, train_dataset=Samples(run.ranks), callbacks=[Watch()])
    trainer._save_checkpoint = run.timed(trainer._save_checkpoint)
    run.begin()
    trainer.train(resume_from_checkpoint=True if run.resumes else None)
    optimizer: Any = trainer.optimizer
    return run.result(trainer.model.parameters(), optimizer.optimizer)


def with_accelerate(run: Run) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from ckptcore import CheckpointManager
    from ckptcore.integrations.accelerate import state_of

    set_seed(1)
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=1
    )
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model = gpt2(run.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Samples(run.ranks), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    run.begin()
    ckpt = CheckpointManager(run.folder)
    state = state_of(accelerator)
    if run.resumes:
        step = SAVES[1]
        if run.ours:
            ckpt.restore(state)
        else:
            accelerator.load_state(str(run.folder / f"step-{step}"))
    run.loaded()
    own = run.timed(lambda step: accelerator.save_state(str(run.folder / f"step-{step}")))
    engine = run.timed(lambda step: ckpt.save_async(step, state))
    while step < STEPS:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            run.step(step, loss.item(), ckpt.wait)
            if step in SAVES:
                (engine if run.ours else own)(step)
            if step == STEPS:
                break
    ckpt.close()
    return run.result(model.parameters(), optimizer.optimizer)


def with_lightning(run: Run) -> dict[str, Any]:
    import lightning.pytorch as lightning
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ckptcore.integrations.lightning import EngineCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt2(run.width)

        def on_train_start(self) -> None:
            run.loaded()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(**batch).loss
            wait = keeper.manager.wait if run.ours else bool
            run.step(self.trainer.global_step + 1, loss.item(), wait)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Stock(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in SAVES:
                run.timed(trainer.save_checkpoint)(run.folder / f"{trainer.global_step}.ckpt")

    class Every(EngineCheckpoint):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in SAVES:
                run.timed(super().on_train_batch_end)(trainer)

    lightning.seed_everything(1, verbose=False)
    keeper: Any = Every(str(run.folder), 2) if run.ours else Stock()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy="ddp" if run.ranks > 1 else "auto",
        max_steps=STEPS,
        callbacks=[keeper],
        logger=False,
        enable_checkpointing=run.ours,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, samples = Module(), Samples(run.ranks)
    how: dict[str, Any] = {"shuffle": True}
    if run.ranks > 1:  # else Lightning puts a wrapper around the sampler, which has no state
        how = {"sampler": DistributedSampler(samples, run.ranks, dist.get_rank(), seed=1)}
    path = str(run.folder / f"{SAVES[1]}.ckpt") if run.resumes and not run.ours else None
    run.begin()
    loader = StatefulDataLoader(samples, batch_size=2, **how)
    trainer.fit(module, loader, ckpt_path=path, weights_only=False if path else None)
    return run.result(module.parameters(), trainer.optimizers[0])


def with_torchtitan(run: Run) -> dict[str, Any]:
    import torchtitan_trainer_ranks as ranks

    settings = {"steps": STEPS, "interval": 2, "last_save_model_only": False}
    trainer = ranks.trainer(str(run.folder), 1, run.ours, size=run.width // 2, layers=6, **settings)
    manager = trainer.checkpointer
    load, save = manager.load, run.timed(manager.save)

    def timed_load(**named: Any) -> Any:
        run.begin()
        done = load(**named)
        run.loaded()
        return done

    def save_some(step: int, **named: Any) -> Any:
        return save(step, **named) if step in SAVES else False

    def log(step: int, *numbers: Any, **_: Any) -> None:
        run.step(step, numbers, manager.maybe_wait_for_saving)

    manager.load, manager.save, trainer.metrics_processor.log = timed_load, save_some, log
    trainer.train()
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers
    found = run.result(model.parameters(), optimizer)
    trainer.close()
    return found


LIBRARIES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "transformers": with_transformers,
    "peft": partial(with_transformers, lora=True),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "torchtitan": with_torchtitan,
}


def one_process(
    rank: int, ranks: int, library: str, folder: str, ours: bool, phase: str, width: int
) -> dict[str, Any]:
    """What `main` runs on each rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(1)
    torch.manual_seed(1)
    return LIBRARIES[library](Run(Path(folder), ours, phase, width, ranks))


def size_of(folder: Path) -> int:
    """Of the checkpoint of the last save."""
    if (folder / "checkpoint").is_dir():  # torchtitan's
        folder = folder / "checkpoint"
    newest = next(path for path in folder.iterdir() if str(SAVES[1]) in path.name)
    files = newest.rglob("*") if newest.is_dir() else [newest]
    return sum(path.stat().st_size for path in files if path.is_file())


def measure(processes: Any, library: str, ours: bool, ranks: int, width: int) -> dict[str, Any]:
    """One round: a whole run, a killed one, and its continuation."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        outcomes = {}
        for phase in ("whole", "killed", "resumed"):
            root = Path(folder) / ("whole" if phase == "whole" else "run")
            root.mkdir(exist_ok=True)
            how = {"library": library, "folder": str(root), "ours": ours, "width": width}
            job = processes.start(
                "one_process", ranks, {**how, "phase": phase}, backend="gloo", deadline=400.0
            )
            outcomes[phase] = job.outcomes()
            wanted = "died" if phase == "killed" else "returned"
            for outcome in outcomes[phase]:
                if outcome.state != wanted:
                    raise RuntimeError(f"{library}, {phase}: {outcome.describe()}")
            shutil.rmtree(root) if phase == "whole" else None
        size = size_of(Path(folder) / "run")
    pairs = [
        (whole.value, resumed.value)
        for whole, resumed in zip(outcomes["whole"], outcomes["resumed"], strict=True)
    ]
    parts = ("losses", "weights", "moments", "draws")
    return {
        "save": max(whole["saves"][1] for whole, _ in pairs),
        "load": max(resumed["load"] for _, resumed in pairs),
        "size": size,
        "differs": {p for p in parts for whole, resumed in pairs if whole[p] != resumed[p]},
    }


def main(width: int = 512, rounds: int = 2, *libraries: str) -> None:
    from ckptcore.testing.processes import RankProcesses

    os.environ.setdefault("CKPTCORE_TEST_PATIENCE", "5")
    for library in libraries or LIBRARIES:
        files = [Path(__file__), TITAN] if library == "torchtitan" else [Path(__file__)]
        needs = {"lightning": "lightning.pytorch", "torchtitan": "ckptcore.integrations.torchtitan"}
        processes = RankProcesses(*files, imports=[needs.get(library, library)])
        for ranks in (1, 2):
            for ours in (False, True):
                found = [measure(processes, library, ours, ranks, width) for _ in range(rounds)]
                save, load = (statistics.median(f[x] for f in found) for x in ("save", "load"))
                differs = sorted(set().union(*(f["differs"] for f in found)))
                whose = "ours" if ours else "its own"
                print(
                    f"{library:13}{ranks} process{'es' if ranks > 1 else '  '}  {whose:9}"
                    f"save {save:6.3f} s   resume {load:6.3f} s   {found[0]['size'] / 1e6:7.1f} MB"
                    f"   differs: {', '.join(differs) or 'nothing'}",
                    flush=True,
                )


if __name__ == "__main__":
    main(*(int(x) if x.isdigit() else x for x in sys.argv[1:]))
