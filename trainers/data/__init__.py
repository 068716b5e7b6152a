"""Loaders: positions in training data that a run goes on from to the last bit."""
