"""What a trainer calls while it runs, and what of it is kept in the checkpoints.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Module: what it gives to users.
_HOMES = """
.diloco.callback: DiLoCoCallback
control: TrainerControlCallback
logs: JsonLogger read_json_array
norms: GradNormLogger ParameterNormLogger WeightNormLogger
profiling: PeakMemory ProfilerCallback
progress: CheckpointMetrics DefaultMetrics InfoCallback ProgressCallback
protocol: CallbackHandler TrainerCallback TrainerControl TrainerState
stopping: DivergenceDetector EarlyStopping
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
