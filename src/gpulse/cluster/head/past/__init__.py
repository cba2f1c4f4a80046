"""Questions about the past, answered from the store."""
