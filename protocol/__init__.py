"""RocketMQ's remoting protocol and message record, sans-IO: bytes in, values out; no socket, no file, no clock.

The modules, from the wire inwards: `frame` cuts a byte stream into frames; `codec` turns a frame's header into a
`Command` and back (`frames.json_header`, `frames.binary_header`, `frames.msgpack_header`); `headers` gives types to the
fields of each request, and `bodies` and `fastjson` to the JSON bodies. `record` is one stored message; `properties`,
`message_id` and `batch` are its parts. `in_flight` finds the request to which a response belongs.
"""
