"""From MQTT to RocketMQ: what waits in the bridge, what becomes of each message, and how RocketMQ gets it."""
