"""dask-metrics' name for the plots of what a monitor recorded: `from dask_metrics import visualize as vis`."""

from gpulse.integrations.dask.visualize import boxes, cluster, lines

__all__ = ["boxes", "cluster", "lines"]
