"""History of samples: recent frames in memory, older ones in Parquet files."""
