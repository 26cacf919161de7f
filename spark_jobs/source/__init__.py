"""The tables of a store as a data source of Spark."""
