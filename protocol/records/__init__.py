"""Records: how a message lies in the commitlog, with its properties."""
