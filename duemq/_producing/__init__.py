"""The parts of a producer: single sends, batches, delays, compression, and changes of waiting messages."""
