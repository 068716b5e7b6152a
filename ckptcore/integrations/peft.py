"""The adapters of a model of Hugging Face's peft, without the weights that they adapt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from ..errors import InvalidState, StateMismatch
from ..state.component import SharingPattern
from ..state.layout import is_dtensor_class
from ..state.modules import bare_module

__all__ = ["Adapters"]


class Adapters:
    """The weights of one adapter, by the names that peft stores them under.

    As component "adapter_model", with `files=hf_files(model)`, they are a folder that
    `PeftModel.from_pretrained` loads. The optimizer's component is `OptimizerState(optimizer,
    model)`.

    model: PeftModel, also in a wrapper (DDP, torch.compile).
    name: text, the adapter (default None: the active one).

    Raises InvalidState for another model, for an adapter that it does not have, and where more is
    trained than the adapter.
    """

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        bare = bare_module(model)
        if not isinstance(bare, PeftModel):
            raise InvalidState(f"model must be a PeftModel, not a {type(bare).__qualname__}")
        self.model, self.name = bare, name or bare.active_adapter
        if self.name not in bare.peft_config:
            known = ", ".join(bare.peft_config)
            raise InvalidState(f"the model has no adapter {self.name!r}; it has {known}")
        values = self.state_dict().values()
        trained = sum(p.numel() for p in bare.parameters() if p.requires_grad)
        if trained > (held := sum(value.numel() for value in values)):
            raise InvalidState(
                f"the model trains {trained:,} items, and adapter {self.name!r} has {held:,}: name "
                "what else is trained in modules_to_save, or save the whole model"
            )
        kinds: set[Any] = {type(value) for value in values}
        if any(map(is_dtensor_class, kinds)):
            self.sharing_pattern = SharingPattern.SHARDED

    def state_dict(self) -> dict[str, Any]:
        # "auto", peft's default, asks the Hub at every call.
        how: dict[str, Any] = {"adapter_name": self.name, "save_embedding_layers": False}
        return dict(get_peft_model_state_dict(self.model, **how))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        live = self.state_dict()
        if differ := sorted(live.keys() ^ state_dict.keys()):
            raise StateMismatch(f"adapter {self.name!r}: only one side has {', '.join(differ)}")
        set_peft_model_state_dict(self.model, dict(state_dict), adapter_name=self.name)
