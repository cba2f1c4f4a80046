"""Diagnosis: find out from frames why GPUs are slow. Pure functions: time and thresholds are arguments."""
