"""Time-series database as an additional store: Prometheus remote write out, PromQL in."""
