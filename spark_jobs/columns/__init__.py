"""Records as columns: matrices of bytes in, arrays out."""
