"""Frames: how a request or a response lies on the wire, and the three ways its header may be written."""
