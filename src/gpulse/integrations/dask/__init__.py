"""GPU metrics of a Dask cluster, by job, graph and task.

from gpulse.integrations.dask import Monitor

monitor = Monitor(client)
monitor.attach(tracking=["mem-util", "compute-util"])
monitor.start()
"""

from gpulse.integrations.dask import visualize
from gpulse.integrations.dask.monitor import Monitor
from gpulse.integrations.dask.monitor_settings import custom_metric

__all__ = ["Monitor", "custom_metric", "visualize"]
