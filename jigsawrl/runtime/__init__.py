"""Several pipelines at once, for real: the event loop with real processes."""
