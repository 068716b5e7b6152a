"""Copies of checkpoints between any two storages."""
