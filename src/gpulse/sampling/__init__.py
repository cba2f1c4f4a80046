"""Sampling: frames at a fixed interval, and recordings of them."""
