"""Data of a cluster on disk and in databases: log, metadata, history, and the stores that query them."""
