"""The programs we start, and everything that they start."""
