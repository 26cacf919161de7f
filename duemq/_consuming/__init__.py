"""How a consumer belongs to its group and reads its queues."""
