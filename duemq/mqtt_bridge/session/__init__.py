"""The bridge's session at the MQTT broker: packets, acknowledgements, and what outlives a kill."""
