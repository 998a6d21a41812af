"""Training: log-probs, gradients, optimizer, data-parallel workers, checkpoints."""
