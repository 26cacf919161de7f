"""Delivery of messages when they become due, from delay levels and timers. Uses `storage` but no sockets; owns no
thread and no task."""
