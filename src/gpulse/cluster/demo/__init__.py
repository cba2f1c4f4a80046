"""Demo cluster without a GPU: simulated nodes with real agents, and a generated history."""
