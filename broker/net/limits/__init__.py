"""Limits of what connections may hold and ask for, so that one client does not starve the others."""
