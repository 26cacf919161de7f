"""The rules of the bridge, and the file that has them."""
