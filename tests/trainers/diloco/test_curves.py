"""How islands learn beside DDP, for the same number of tokens, and what they send. `make stress`
prints the figures."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import GPTArguments
from ckpt_trainers.data.corpus import ByteWindows, read_corpus, split_corpus
from ckpt_trainers.diloco import Access, DiLoCoServer, DiLoCoWorker, Rules
from ckpt_trainers.diloco.outer import named_parameters, nesterov
from ckpt_trainers.model import ByteGPT

from .islands import PLAIN, at_once

GPT = GPTArguments(n_layer=2, n_head=4, n_embd=64, block_size=64, dropout=0.0)
STEPS, SYNC, BATCH = 200, 20, 8


def batch(data: ByteWindows, step: int, island: int, islands: int) -> dict[str, torch.Tensor]:
    """What an island, or a rank of DDP, has in a step."""
    generator = torch.Generator().manual_seed(step * islands + island)
    chosen = torch.randint(len(data), (BATCH,), generator=generator)
    windows = [data[int(n)] for n in chosen]
    return {name: torch.stack([window[name] for window in windows]) for name in windows[0]}


def adamw(model: ByteGPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


@torch.no_grad()
def held_out(model: ByteGPT, data: ByteWindows) -> float:
    windows = [data[n] for n in range(0, len(data), max(1, len(data) // 256))]
    inputs = {name: torch.stack([window[name] for window in windows]) for name in windows[0]}
    loss = model(**inputs).loss
    assert loss is not None
    return float(loss)


def by_ddp(start: ByteGPT, train: ByteWindows, test: ByteWindows, ranks: int) -> list[float]:
    """The mean gradient of all ranks in each step, as DDP has it."""
    model, curve = copy.deepcopy(start), []
    optimizer = adamw(model)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(**batch(train, step, rank, ranks)).loss / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SYNC == 0:
            curve.append(held_out(model, test))
    return curve


def by_islands(
    start: ByteGPT,
    train: ByteWindows,
    test: ByteWindows,
    islands: int,
    outer: Any = nesterov,
    **options: Any,
) -> tuple[list[float], float, float]:
    """(Held-out loss of the global parameters after each sync, bytes sent and received by an island
    a step)."""

    def island(number: int) -> tuple[list[float], DiLoCoWorker]:
        model, curve = copy.deepcopy(start), []
        optimizer = adamw(model)
        named = {"worker_id": f"island-{number}", "sync_every": SYNC, **options}
        worker = DiLoCoWorker(model, optimizer, server.address, **named)
        with worker:
            for step in range(STEPS):
                optimizer.zero_grad()
                model(**batch(train, step, number, islands)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if number == 0 and (step + 1) % SYNC == 0:
                    curve.append(held_out(model, test))
            sent.append(worker.sync_metrics["diloco/bytes_sent"] / STEPS)
            received.append(worker.sync_metrics["diloco/bytes_received"] / STEPS)
        return curve, worker

    sent: list[float] = []
    received: list[float] = []
    rules, access = Rules(workers=islands), Access(port=0)
    with DiLoCoServer(start, rules, access, outer_optimizer=outer) as server:
        found = at_once({f"{n}": partial(island, n) for n in range(islands)}, 1500)
    return found["0"][0], max(sent), max(received)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_islands_learn_nearly_as_fast_as_ddp_and_send_a_fraction() -> None:
    torch.manual_seed(42)
    start = ByteGPT(GPT)
    train, test = split_corpus(read_corpus((), 4 * 2**20), GPT.block_size)
    size = sum(p.numel() for p in named_parameters(start).values())
    print(f"{size:,} parameters; held-out loss after {SYNC}, {2 * SYNC}, ... {STEPS} steps")
    alone = by_ddp(start, train, test, 1)
    print("    one alone   ", " ".join(f"{value:.3f}" for value in alone))
    for number in (2, 4):
        ddp = by_ddp(start, train, test, number)
        curve, sent, received = by_islands(start, train, test, number)
        mean, _, _ = by_islands(start, train, test, number, PLAIN)
        parts, part_sent, part_received = by_islands(start, train, test, number, num_fragments=2)
        one_way = 2 * (number - 1) / number * 4 * size  # of a ring all-reduce in float32
        curves = {"DDP": ddp, "Nesterov": curve, "2 fragments": parts, "averaging": mean}
        for name, values in curves.items():
            print(f"{number} x {name:12}", " ".join(f"{value:.3f}" for value in values))
        print(
            f"bytes a step: DiLoCo {sent:,.0f} sent and {received:,.0f} received, 2 fragments "
            f"{part_sent:,.0f} and {part_received:,.0f}; DDP {one_way:,.0f} and {one_way:,.0f} "
            f"({2 * one_way / (sent + received):.0f} times as many)"
        )
        # Ten outer steps from scratch: averaging is near DDP, momentum is not yet.
        assert mean[-1] < alone[-1] and mean[-1] < 1.15 * ddp[-1]
        assert curve[-1] < 1.3 * ddp[-1] and curve[-1] < 0.75 * curve[0]
        assert 20 * (sent + received) < 2 * one_way
