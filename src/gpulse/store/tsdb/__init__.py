"""An engine for time series beside the head's own store: Prometheus remote write out, PromQL in."""
