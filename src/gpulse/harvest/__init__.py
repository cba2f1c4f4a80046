"""Idle GPUs do useful work, and are given back at once."""
