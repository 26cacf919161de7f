"""The peers that duemq is tested with: Apache's own brokers, their clients and mqadmin, and the programs that drive
them.

`python -m tests.peers install` fetches and builds everything below the cache directory ($DUEMQ_PEERS, or
~/.cache/duemq-peers). This takes a minute or two the first time and no time afterwards.

    brokers/          duemq's broker and Apache's, and its name server, as processes with one interface
    mqadmin/          mqadmin in a JVM that runs one command after the other
    clients.py        the Java, Go and C++ clients behind one typed, awaitable interface
    capabilities.py   what each client library cannot do, and why
    java/ go/ cpp/    the client programs, each a process that speaks JSON lines (see PROTOCOL.md)
"""
