"""`duemq store repair`: derived files made anew from the commitlog, without a broker."""
