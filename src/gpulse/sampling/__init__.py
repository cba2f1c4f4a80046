"""The tick: frames at a steady pace, and where they go."""
