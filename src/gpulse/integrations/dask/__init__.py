"""GPU metrics of a Dask cluster, by job, graph and task.

from gpulse.integrations.dask import Monitor

monitor = Monitor(client)
monitor.attach(tracking=["mem-util", "compute-util"])
monitor.start()
"""

from gpulse.integrations.dask import visualize
from gpulse.integrations.dask.custom import custom_metric
from gpulse.integrations.dask.monitor import Monitor

__all__ = ["Monitor", "custom_metric", "visualize"]
