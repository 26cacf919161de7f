"""Connections of the client: requests, routes, pools."""
