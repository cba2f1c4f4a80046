"""Who uses the GPUs and who is at the machine."""
