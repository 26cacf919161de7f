"""The content of requests and responses: their header fields and bodies, under RocketMQ's names."""
