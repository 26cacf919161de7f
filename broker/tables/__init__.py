"""What the broker knows of topics, groups, offsets, clients and locks; kept in config/."""
