"""What a trainer calls while it runs, and what of it is kept in the checkpoints.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..diloco.callback import DiLoCoCallback as DiLoCoCallback
    from .control import TrainerControlCallback as TrainerControlCallback
    from .divergence import DivergenceDetector as DivergenceDetector
    from .info import InfoCallback as InfoCallback
    from .json_log import JsonLogger as JsonLogger
    from .json_log import read_json_array as read_json_array
    from .memory import PeakMemory as PeakMemory
    from .metrics import CheckpointMetrics as CheckpointMetrics
    from .metrics import DefaultMetrics as DefaultMetrics
    from .norms import GradNormLogger as GradNormLogger
    from .norms import ParameterNormLogger as ParameterNormLogger
    from .norms import WeightNormLogger as WeightNormLogger
    from .profiler import ProfilerCallback as ProfilerCallback
    from .progress import ProgressCallback as ProgressCallback
    from .protocol import CallbackHandler as CallbackHandler
    from .protocol import TrainerCallback as TrainerCallback
    from .protocol import TrainerControl as TrainerControl
    from .protocol import TrainerState as TrainerState
    from .stopping import EarlyStopping as EarlyStopping
    from .tensorboard import ResumableSummaryWriter as ResumableSummaryWriter
    from .tensorboard import TBLogger as TBLogger
    from .textgen import TextgenCallback as TextgenCallback

_HOMES = {
    "CallbackHandler": "protocol",
    "CheckpointMetrics": "metrics",
    "DefaultMetrics": "metrics",
    "DiLoCoCallback": ".diloco.callback",
    "DivergenceDetector": "divergence",
    "EarlyStopping": "stopping",
    "GradNormLogger": "norms",
    "InfoCallback": "info",
    "JsonLogger": "json_log",
    "ParameterNormLogger": "norms",
    "PeakMemory": "memory",
    "ProfilerCallback": "profiler",
    "ProgressCallback": "progress",
    "ResumableSummaryWriter": "tensorboard",
    "TBLogger": "tensorboard",
    "TextgenCallback": "textgen",
    "TrainerCallback": "protocol",
    "TrainerControl": "protocol",
    "TrainerControlCallback": "control",
    "TrainerState": "protocol",
    "WeightNormLogger": "norms",
    "read_json_array": "json_log",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
