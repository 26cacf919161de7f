"""Delay levels: the queues of SCHEDULE_TOPIC_XXXX and the due times of their messages."""
