"""The append-only log: what is in it survives whatever happens to the process."""
