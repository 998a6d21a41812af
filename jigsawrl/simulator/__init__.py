"""The event loop with durations from cost models: policies run here exactly as they run for real."""
