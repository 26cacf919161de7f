"""The content of requests and responses: their header fields and bodies, by RocketMQ's names."""
