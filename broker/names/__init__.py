"""The name server inside, and registration at those outside."""
