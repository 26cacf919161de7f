"""Delivery of due messages: their records are copied to their real queues, batch by batch."""
