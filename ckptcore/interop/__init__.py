"""A bridge from and to what other libraries write. No file of another library is ever executed: its
pickles are read with lists of what they may name.

`import_checkpoint` makes a checkpoint of a Hugging Face folder, a checkpoint of its Trainer, what
Accelerate saves, a folder of torch.distributed.checkpoint, a file of torch.save, or a folder of
such files. `export_checkpoint` writes Hugging Face folders, files of torch.save and folders of
torch.distributed.checkpoint. Both stream: no more of a state is in memory than a few tensors.
"""

from __future__ import annotations

from .exporting import ExportReport, export_checkpoint
from .importing import ImportReport, import_checkpoint, load_foreign

__all__ = ["ExportReport", "ImportReport", "export_checkpoint", "import_checkpoint", "load_foreign"]
