"""Where frames come from: the driver, /proc and /sys, recordings, and the demo machine."""
