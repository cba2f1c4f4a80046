"""Reports on jobs, users and nodes over time, computed from a store's answers."""
