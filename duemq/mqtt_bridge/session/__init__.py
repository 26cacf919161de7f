"""The bridge's session at the MQTT broker: packets, acknowledgements, and the journal."""
