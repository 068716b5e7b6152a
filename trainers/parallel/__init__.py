"""Trainers for several processes, and where a process stands among them."""
