"""Samples by time: recent ones in memory, older ones in Parquet files."""
