"""What a run leaves behind: events, metrics, live progress, the closing table."""
