"""The daemon: servers, connections, request handlers, the embedded name server. The only package that puts the others
together."""
