"""NVIDIA's management library: GPUs, what runs on them, and what went wrong with them."""
