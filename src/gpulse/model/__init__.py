"""What gpulse talks about: metrics, devices, processes, frames and findings. Standard library only."""
