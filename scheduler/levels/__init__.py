"""Delay levels: the queues of SCHEDULE_TOPIC_XXXX and when what is in them is due."""
