"""What a topic's owner may ask for: rates, spreads, pauses, and a way to catch up."""
