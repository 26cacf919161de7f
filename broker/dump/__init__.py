"""Any file of a store as lines of text: `python -m duemq.broker.dump FILE...`, see `dump.__main__`."""
