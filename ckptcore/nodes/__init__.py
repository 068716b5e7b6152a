"""Nodes that share no storage: what only roots need that are one on every node."""
