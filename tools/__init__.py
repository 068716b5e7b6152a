"""The `ckpt` command: look at checkpoints, check and copy them, without torch, on ckptcore's public
names only."""
