"""Configurations of harvest, in TOML or in gpu_mon's INI format, checked against the machine before anything starts."""
