"""Blocks of people's own code: what the GPUs did while they ran."""
