"""From frames to findings. Pure: time and thresholds are arguments."""
