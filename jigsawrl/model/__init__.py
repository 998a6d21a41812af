"""Models: one decoder-only transformer, its adapters, and Hugging Face folders in and out."""
