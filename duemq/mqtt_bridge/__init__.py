"""The bridge between an MQTT broker and duemq, or Apache RocketMQ: messages both ways, by rules, and delays."""
