"""A session as a file: one frame a step across all nodes, streamed from a store, never built in memory."""
