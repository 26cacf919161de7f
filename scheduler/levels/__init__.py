"""Delay levels: the queues of SCHEDULE_TOPIC_XXXX and the deliver times of their messages."""
