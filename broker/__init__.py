"""The daemon: servers, connections, request handlers, the embedded name server. The only package that combines all
others."""
