"""Many nodes and one head: what agents send, and what the head does with it."""
