"""From MQTT to RocketMQ: the messages that wait in the bridge, the decision about each, and sending them."""
