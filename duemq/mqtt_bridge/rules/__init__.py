"""What the bridge is to do: the rules, and the file that says them."""
