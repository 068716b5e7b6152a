"""Texts that the model writes while it is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.tensor import DTensor

from .protocol import KeptCallback, TrainerState

try:
    import transformers
except ImportError:
    transformers = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

SAMPLING = {"do_sample": True, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.15}


class TextgenCallback(KeptCallback):
    """Lets the model go on from some prompts at evaluations, and writes the texts to a
    SummaryWriter under "eval-text".

    Training is the same to the last bit with and without it. The random numbers of a text follow
    from the seed of the run and the step. Off, with one warning, where transformers or a
    processing_class is missing, or the model has no `generate`.

    summary_writer: such as a ResumableSummaryWriter.
    prompts: list of texts, or path of a YAML file that holds one.
    generation_config: options of transformers' GenerationConfig (default SAMPLING).
    generation_steps: at least so many steps from one text to the next (default: eval_steps).
    max_new_tokens: length of what is added to each prompt (default 200).

    Raises ValueError for prompts that are no list of texts.
    """

    kept = ("next_step",)
    next_step = 0
    _off = False

    def __init__(
        self,
        summary_writer: Any,
        prompts: Sequence[str] | str,
        generation_config: Mapping[str, Any] | None = None,
        generation_steps: int | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        where, texts = "", prompts
        if isinstance(prompts, str):
            where = f" ({prompts})"
            texts = yaml.safe_load(Path(prompts).read_text(encoding="utf-8"))
        if not isinstance(texts, list | tuple) or not all(isinstance(p, str) for p in texts):
            instead = "give a list of texts, or the path of a YAML file that holds one"
            raise ValueError(f"prompts{where}: {instead}")
        self.writer, self.prompts = summary_writer, list(texts)
        self.config = dict(SAMPLING if generation_config is None else generation_config)
        self.generation_steps, self.max_new_tokens = generation_steps, max_new_tokens

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        model: Any = None,
        processing_class: Any = None,
        trainer: Any = None,
        **_: Any,
    ) -> None:
        if self._off or state.global_step < self.next_step:
            return
        piped = hasattr(trainer, "pipeline_generate")
        if missing := _missing(model, processing_class, piped):
            self._off = True
            if state.is_world_process_zero:
                log.warning("%s is off: %s", self.name, missing)
            return
        self.next_step = state.global_step + (self.generation_steps or state.eval_steps or 1)
        spread = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if not (state.is_world_process_zero or piped or spread):
            return
        with undisturbed(trainer, (max(args.seed, 0) << 32) + state.global_step):
            texts = [
                self._text(prompt, processing_class, trainer, piped=piped, spread=spread)
                for prompt in self.prompts
            ]
        if state.is_world_process_zero:
            self.writer.add_text("eval-text", "\n\n---\n\n".join(texts), state.global_step)
            self.writer.flush()

    def _text(self, prompt: str, tokenizer: Any, trainer: Any, *, piped: bool, spread: bool) -> str:
        """One prompt at a time: padding would be seen by models that know no attention mask."""
        given = tokenizer(prompt, truncation=True)["input_ids"]
        ids = torch.tensor([given], device=trainer.device)
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        options = {"eos_token_id": end, "pad_token_id": end if pad is None else pad}
        options |= {"max_new_tokens": self.max_new_tokens, **self.config}
        if piped:
            found: Tensor = trainer.pipeline_generate(input_ids=ids, **options)
        else:
            options = {"bos_token_id": tokenizer.bos_token_id, **options}
            with trainer.computing(training=False):
                found = trainer.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=transformers.GenerationConfig(**options),  # type: ignore[no-untyped-call]
                    synced_gpus=spread,
                    tokenizer=tokenizer,
                )
        completion = tokenizer.decode(found[0, len(given) :].tolist(), skip_special_tokens=True)
        return f"{prompt} [START] {completion}"


def _missing(model: Any, processing_class: Any, piped: bool) -> str | None:
    if processing_class is None:
        return "the trainer has no processing_class, which turns text into tokens"
    if not piped and transformers is None:
        return "transformers is not installed (pip install transformers)"
    if not piped and not callable(getattr(model, "generate", None)):
        return f"{type(model).__name__} has no method generate"
    return None


@contextmanager
def undisturbed(trainer: Any, seed: int) -> Iterator[None]:
    """Evaluation mode, no gradients, nothing compiled, a seed of its own; all undone afterwards."""
    device: torch.device = trainer.device
    on_cpu = device.type == "cpu"
    modules = list(dict.fromkeys([*trainer.wrapped.modules(), *trainer.model.modules()]))
    before = [(module, module.training, module._compiled_call_impl) for module in modules]
    try:
        for module in modules:
            module.training, module._compiled_call_impl = False, None
        streams = torch.random.fork_rng([] if on_cpu else [device], device_type=device.type)
        # Not inference mode: what FSDP gathers meanwhile is used for training, too.
        with streams, torch.no_grad():
            torch.default_generator.manual_seed(seed)
            if not on_cpu:
                torch.get_device_module(device).manual_seed(seed)
            yield
    finally:
        for module, training, call in before:
            module.training, module._compiled_call_impl = training, call
            reshard = getattr(module, "reshard", None)  # FSDP: no backward pass will do it
            if callable(reshard):
                reshard()
