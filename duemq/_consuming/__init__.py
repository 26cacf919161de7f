"""The parts of a consumer: its membership of a group, the readers of its queues, and the calls of its handler."""
