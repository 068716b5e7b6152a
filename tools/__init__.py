"""The `ckpt` command: look at checkpoints and check them, without torch, on ckptcore's public names only."""
