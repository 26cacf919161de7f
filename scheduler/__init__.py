"""When messages become due: delay levels and their queues. Uses storage but no sockets; owns no thread and no task."""
