"""What a trainer calls while it runs, and what of it is kept in the checkpoints."""
