"""The MQTT bridge: what speaks MQTT sends into the future, and RocketMQ's consumers get the devices' messages.

`duemq mqtt-bridge --config bridge.toml` runs it. It needs the package aiomqtt: `pip install 'duemq[mqtt]'`.
"""
