"""Apache's mqadmin."""
