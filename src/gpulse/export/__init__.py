"""Snapshots and frames in other shapes: JSON, CSV, SQLite."""
