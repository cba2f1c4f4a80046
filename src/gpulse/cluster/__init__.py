"""Agents on many nodes, the head that stores their frames, and the clients of the head."""
