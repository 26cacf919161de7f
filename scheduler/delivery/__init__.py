"""Delivery of due messages: their records are copied to where they belong, batch by batch."""
