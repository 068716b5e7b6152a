"""Where checkpoints lie: local disks, and any other fsspec filesystem. Nothing here imports
torch."""
