"""`duemq store repair`: rebuilds derived files from the commitlog, without a broker."""
