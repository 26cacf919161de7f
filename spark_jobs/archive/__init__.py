"""Archives in Parquet, tables that are appended to, and the way back."""
