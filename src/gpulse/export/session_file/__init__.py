"""Writing session files: one frame per time step with all nodes, streamed from a store."""
