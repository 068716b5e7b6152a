"""What exists under a root: how a checkpoint comes to be there, which there are, and how one goes.
Needs no torch."""
