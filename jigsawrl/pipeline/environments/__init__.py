"""Environments: where they run, and the ones that come with the package."""
