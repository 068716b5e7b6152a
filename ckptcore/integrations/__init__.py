"""State of other libraries' objects, as components of a checkpoint. Each module needs its library,
and nothing else in ckptcore imports it."""
