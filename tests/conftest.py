"""Makes the shared fixtures known to every test."""

pytest_plugins = ["tests.fakes.nvml.fixtures"]
