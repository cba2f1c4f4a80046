"""The head: receives and stores the frames of agents, and answers queries."""
