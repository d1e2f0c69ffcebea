"""The parts that codecs share: the protocol, payloads, scratch buffers, random bits."""
