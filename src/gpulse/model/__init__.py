"""The data model: metrics, devices, processes, frames and findings. Standard library only."""
