"""The client's network layer: connections, pools, requests and routes."""
