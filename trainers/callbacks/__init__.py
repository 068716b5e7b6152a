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

# Module: what it gives to users.
_HOMES = """
.diloco.callback: DiLoCoCallback
control: TrainerControlCallback
divergence: DivergenceDetector
info: InfoCallback
json_log: JsonLogger read_json_array
memory: PeakMemory
metrics: CheckpointMetrics DefaultMetrics
norms: GradNormLogger ParameterNormLogger WeightNormLogger
profiler: ProfilerCallback
progress: ProgressCallback
protocol: CallbackHandler TrainerCallback TrainerControl TrainerState
stopping: EarlyStopping
tensorboard: ResumableSummaryWriter TBLogger
textgen: TextgenCallback
"""
_LINES = (line.partition(":") for line in _HOMES.strip().splitlines())
_HOME_OF = {name: home for home, _, names in _LINES for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
