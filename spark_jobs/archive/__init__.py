"""Archives in Parquet, restoring them, and tables that stores are appended to."""
