"""When messages become due: delay levels and their queues. Knows storage, not sockets; owns no thread and no task."""
