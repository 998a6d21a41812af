"""Rollouts: a paged KV cache, continuous batching, keyed sampling, partial results."""
