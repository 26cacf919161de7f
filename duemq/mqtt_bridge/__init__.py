"""The MQTT bridge: carries messages between an MQTT broker and RocketMQ, and delays those of MQTT clients.

`duemq mqtt-bridge --config bridge.toml` runs it. It needs the package aiomqtt: `pip install 'duemq[mqtt]'`.
"""
