"""Profiling of code blocks: what the GPUs did while each block ran."""
