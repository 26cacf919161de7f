"""Records as columns: a buffer of bytes in, arrays out."""
