"""Which messages go where: the file of rules, and what its texts mean."""
