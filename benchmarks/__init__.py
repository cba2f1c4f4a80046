"""How fast gpulse is and what it costs, beside other programs on the same fake or real hardware."""
