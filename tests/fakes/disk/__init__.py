"""A disk that forgets what was not synced: a trace of all writes, and what a power cut leaves of them."""
