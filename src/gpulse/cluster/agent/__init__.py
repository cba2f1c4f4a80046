"""The agent of one node: samples frames and resends them until the head has them on disk."""
