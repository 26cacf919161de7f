"""What requests and responses say: their header fields and bodies, as RocketMQ names them."""
