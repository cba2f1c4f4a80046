"""Configurations of harvest: gpu_mon's INI files and our TOML, checked against the machine before anything starts."""

from gpulse.harvest.config.load import load
from gpulse.harvest.config.template import template

__all__ = ["load", "template"]
