"""The rules of the bridge, and the file from which they are read."""
