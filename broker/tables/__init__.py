"""The broker's tables of topics, groups, offsets, clients and locks; those that outlive it are kept in config/."""
