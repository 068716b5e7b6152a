"""What lies on disk: digests, tensor files, values, indexes, manifests. Nothing here imports
torch."""
