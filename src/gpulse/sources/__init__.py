"""Sources of frames: the driver, /proc and /sys, recordings, and the demo machine."""
