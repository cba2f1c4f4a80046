"""Run programs on idle GPUs, and stop them as soon as somebody needs the GPUs."""
