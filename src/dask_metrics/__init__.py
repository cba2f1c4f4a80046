"""dask-metrics' names for gpulse's monitor of Dask clusters: `from dask_metrics import Monitor`."""

from gpulse.integrations.dask import Monitor, custom_metric, visualize

__all__ = ["Monitor", "custom_metric", "visualize"]
