"""Who is there: how ranks agree without collectives, and how replicas are compared."""
