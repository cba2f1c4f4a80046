"""A session's file read back: statistics, gaps and pictures of it."""
