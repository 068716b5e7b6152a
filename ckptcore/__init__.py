"""ckptcore: a distributed checkpoint engine for any PyTorch training loop.

Names are imported when they are first used: `from ckptcore import open_checkpoint` does not import
torch, `from ckptcore import CheckpointManager` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors as _errors
from .errors import *  # noqa: F403
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .catalog.catalog import restore_candidates as restore_candidates
    from .catalog.catalog import scan_root as scan_root
    from .catalog.folder import CheckpointInfo as CheckpointInfo
    from .catalog.retention import KeepBest as KeepBest
    from .catalog.retention import KeepEvery as KeepEvery
    from .catalog.retention import KeepLast as KeepLast
    from .catalog.retention import RetentionPolicy as RetentionPolicy
    from .copy.checkpoint import copy_checkpoint as copy_checkpoint
    from .events import SaveEvent as SaveEvent
    from .events import TensorBoardEvents as TensorBoardEvents
    from .format.manifest import CheckpointManifest as CheckpointManifest
    from .format.manifest import ComponentManifest as ComponentManifest
    from .format.values import Opaque as Opaque
    from .format.values import register_codec as register_codec
    from .interop.exporting import ExportReport as ExportReport
    from .interop.exporting import export_checkpoint as export_checkpoint
    from .interop.hf_files import hf_files as hf_files
    from .interop.importing import ImportReport as ImportReport
    from .interop.importing import import_checkpoint as import_checkpoint
    from .interop.importing import load_foreign as load_foreign
    from .interop.quantization import quantization_config as quantization_config
    from .loading.fresh import load_state as load_state
    from .loading.load import LoadReport as LoadReport
    from .loading.view import CheckpointView as CheckpointView
    from .loading.view import Problem as Problem
    from .loading.view import StoredBox as StoredBox
    from .loading.view import TensorInfo as TensorInfo
    from .loading.view import open_checkpoint as open_checkpoint
    from .manager import CheckpointCoordinator as CheckpointCoordinator
    from .manager import CheckpointManager as CheckpointManager
    from .preemption import PreemptionGuard as PreemptionGuard
    from .ranks.communicator import Communicator as Communicator
    from .ranks.communicator import SingleProcess as SingleProcess
    from .ranks.store import StoreCommunicator as StoreCommunicator
    from .saving.background import SaveHandle as SaveHandle
    from .state.component import SharingPattern as SharingPattern
    from .state.component import StateComponent as StateComponent
    from .state.component import Stateful as Stateful
    from .state.component import StatefulProvider as StatefulProvider
    from .state.component import ValidationLevel as ValidationLevel
    from .state.containers import register_tensor_class as register_tensor_class
    from .state.layout import Shard as Shard
    from .state.modules import ModelState as ModelState
    from .state.modules import canonical_names as canonical_names
    from .state.modules import register_wrapper as register_wrapper
    from .state.optimizers import OptimizerState as OptimizerState
    from .state.plain import Value as Value
    from .state.preflight import PreflightReport as PreflightReport
    from .state.preflight import Refusal as Refusal
    from .state.preflight import preflight as preflight
    from .state.randomness import RNGState as RNGState
    from .state.words import Global as Global
    from .state.words import PerGroup as PerGroup
    from .state.words import PerNode as PerNode
    from .state.words import PerRank as PerRank
    from .state.words import Replicated as Replicated
    from .state.words import Sharded as Sharded
    from .storage.base import Storage as Storage
    from .storage.opening import open_storage as open_storage
    from .storage.urls import join_url as join_url
    from .storage.urls import masked_url as masked_url
    from .storage.urls import split_url as split_url
    from .tiers.uploads import Tier as Tier
    from .upkeep import Leftover as Leftover
    from .upkeep import Sharing as Sharing
    from .upkeep import delete_checkpoint as delete_checkpoint
    from .upkeep import find_leftovers as find_leftovers
    from .upkeep import kept_by as kept_by
    from .upkeep import pin_checkpoint as pin_checkpoint
    from .upkeep import shared_files as shared_files
    from .upkeep import sweep_root as sweep_root
    from .upkeep import unpin_checkpoint as unpin_checkpoint

_HOMES = {
    "catalog.catalog": ["restore_candidates", "scan_root"],
    "catalog.folder": ["CheckpointInfo"],
    "catalog.retention": ["KeepBest", "KeepEvery", "KeepLast", "RetentionPolicy"],
    "copy.checkpoint": ["copy_checkpoint"],
    "events": ["SaveEvent", "TensorBoardEvents"],
    "format.manifest": ["CheckpointManifest", "ComponentManifest"],
    "format.values": ["Opaque", "register_codec"],
    "interop.exporting": ["ExportReport", "export_checkpoint"],
    "interop.hf_files": ["hf_files"],
    "interop.importing": ["ImportReport", "import_checkpoint", "load_foreign"],
    "loading.fresh": ["load_state"],
    "interop.quantization": ["quantization_config"],
    "loading.load": ["LoadReport"],
    "loading.view": ["CheckpointView", "Problem", "StoredBox", "TensorInfo", "open_checkpoint"],
    "manager": ["CheckpointCoordinator", "CheckpointManager"],
    "preemption": ["PreemptionGuard"],
    "ranks.communicator": ["Communicator", "SingleProcess"],
    "ranks.store": ["StoreCommunicator"],
    "saving.background": ["SaveHandle"],
    "state.component": [
        "SharingPattern",
        "StateComponent",
        "Stateful",
        "StatefulProvider",
        "ValidationLevel",
    ],
    "state.containers": ["register_tensor_class"],
    "state.layout": ["Shard"],
    "state.modules": ["ModelState", "canonical_names", "register_wrapper"],
    "state.optimizers": ["OptimizerState"],
    "state.plain": ["Value"],
    "state.preflight": ["PreflightReport", "Refusal", "preflight"],
    "state.randomness": ["RNGState"],
    "state.words": ["Global", "PerGroup", "PerNode", "PerRank", "Replicated", "Sharded"],
    "storage.base": ["Storage"],
    "storage.opening": ["open_storage"],
    "storage.urls": ["join_url", "masked_url", "split_url"],
    "tiers.uploads": ["Tier"],
    "upkeep": [
        "Leftover",
        "Sharing",
        "delete_checkpoint",
        "find_leftovers",
        "kept_by",
        "pin_checkpoint",
        "shared_files",
        "sweep_root",
        "unpin_checkpoint",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, *_errors.__all__, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptcore' has no attribute {name!r}")
    value = getattr(import_module(f"ckptcore.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
