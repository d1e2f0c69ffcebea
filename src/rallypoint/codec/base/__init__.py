"""What codecs are made of: the protocol, payloads, scratch buffers, random bits."""
