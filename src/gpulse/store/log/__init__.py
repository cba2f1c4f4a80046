"""Append-only log on disk, which survives crashes of the process and of the machine."""
