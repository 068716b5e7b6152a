"""What must be equal on several ranks: the table of sharded tensors, and replicas."""
