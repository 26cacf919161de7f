"""TLS: its settings, its certificates and keys, which are read again when they change, and self-signed ones."""
