"""Helpers shared by the tests of the wire: a broker without sockets, an event loop whose time a test advances, and
short ways to build commands."""
