"""Delivery policies of a topic: rates, spreads, pauses, and ways to catch up."""
