"""Decoding on an NVIDIA GPU: a step's kernels, the graphs that replay them, and the bursts they run in."""
