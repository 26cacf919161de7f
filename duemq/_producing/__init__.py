"""How a producer sends: delays, batches, compression."""
