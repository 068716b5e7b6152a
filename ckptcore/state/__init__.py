"""What lies in memory: components and who shares them, nested state, tensor memory, adapters for
torch objects."""
