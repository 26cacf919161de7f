"""The store: RocketMQ's files, written and read by one process. No sockets, no asyncio, no thread of its own.

From the bottom up: `file_names` has the names of all files; `files` is the injected file layer and `clock` the injected
clock; `segments` is a sequence of fixed-size files; `commitlog` and `consume_queue` are the two kinds of sequence;
`append` stages records and writes them in one go; `recovery` makes the consume queues agree with the commitlog at
start; `checkpoint`, `config_file` and `retention` maintain the rest of the directory; `store` puts them together.
"""
