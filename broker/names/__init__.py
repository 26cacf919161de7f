"""The embedded name server, and registration with external ones."""
