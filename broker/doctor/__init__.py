"""`duemq doctor`: looks at a configuration and at the machine, and says what to change."""
