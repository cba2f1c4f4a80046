"""Time-series database beside the head's own store: Prometheus remote write out, PromQL in."""
