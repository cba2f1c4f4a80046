"""A whole cluster without a GPU: simulated nodes as real agents, and the past that their head would have kept."""
